"""The examples, as their readers run them, at a small size."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import tiny

pytestmark = tiny.pytestmark

EXAMPLES = Path(__file__).parents[2] / "examples"


class Run:
    """Runs an example in this process: importing what they need takes longer than they do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, name: str, *arguments: str) -> str:
        self._monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return self._capsys.readouterr().out


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


def figures(output: str, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf"\b{re.escape(name)} (-?[\d.e-]+)", output)]


def test_quickstart_has_a_gradient_in_every_channel_and_learns(run: Run) -> None:
    output = run("quickstart.py")
    assert len(figures(output, "gradient")) == 3
    assert min(figures(output, "gradient")) > 0
    totals = figures(output, "total")
    assert len(totals) == 5
    assert totals[-1] < totals[0]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("grpo_gsm.py", ["--steps", "2", "--completion-length", "4"], ["entropy"]),
        (
            "sdpo_errors.py",
            ["--steps", "2", "--completion-length", "8"],
            ["sdpo/loss", "sdpo/active", "replay/loss"],
        ),
    ],
)
def test_trainer_examples_run(
    run: Run, name: str, arguments: list[str], expected: list[str]
) -> None:
    output = run(name, *arguments)
    assert len(figures(output, "reward")) == 2
    for figure in expected:
        assert min(figures(output, figure)) > 0, output
