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

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
    ) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(cache))

    def __call__(self, name: str, *arguments: str) -> str:
        self._monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return self._capsys.readouterr().out


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    return Run(monkeypatch, capsys, tmp_path_factory.getbasetemp() / "hugging_face")


def figures(output: str, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf"\b{re.escape(name)} (-?[\d.e-]+)", output)]


def test_quickstart_has_a_gradient_in_every_channel_and_learns(run: Run) -> None:
    output = run("quickstart.py")
    assert len(figures(output, "gradient")) == 3
    assert min(figures(output, "gradient")) > 0
    totals = figures(output, "total")
    assert len(totals) == 5
    assert totals[-1] < totals[0]


def test_grpo_has_a_reward_and_a_gradient_in_every_step(run: Run) -> None:
    output = run("grpo_gsm.py", "--steps", "3")
    for figure in ("reward", "gradient"):
        assert len(figures(output, figure)) == 3
        assert min(figures(output, figure)) > 0, output


def test_sdpo_errors_learns_from_hints_and_pairs(run: Run) -> None:
    output = run("sdpo_errors.py", "--steps", "2", "--completion-length", "8")
    assert len(figures(output, "reward")) == 2
    for figure in ("sdpo/loss", "sdpo/active", "replay/loss"):
        assert min(figures(output, figure)) > 0, output
