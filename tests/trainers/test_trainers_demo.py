"""The demo's arithmetic, verdict and picture; ``make demo`` itself is run by CI."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    return demo


def _figures(demo: Any, index: int, loss: float) -> Any:
    spec = demo.make_specs("demo-test", rounds=2, sync_every=10)[index]
    n = spec.replicas
    return demo.RunFigures(
        spec=spec,
        parameters=1_000_000,
        loss=loss,
        tokens=640 * n,
        bytes_sent=[8_000_000] * n,
        bytes_received=[24_000_000] * n,
        seconds_blocked=[1.0] * n,
        digests=["d1"] * n,
        training=[[(10, 5.0), (20, 4.0)]] * n,
        validation=[(0, 7.0), (10, 5.0), (20, loss)],
    )


def _text(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_traffic_compares_with_a_ring_all_reduce_per_step(demo: Any) -> None:
    text = _text(demo.traffic(_figures(demo, 0, 3.0)))
    assert "120.0 MB" in text  # 20 steps x 2(4-1)/4 x 4 MB
    assert "15x" in text
    assert "5x" in text


def test_quality_shows_both_models(demo: Any) -> None:
    text = _text(demo.quality(_figures(demo, 0, 3.0), _figures(demo, 1, 3.5)))
    assert "3.000" in text
    assert "33.1" in text
    assert "2,560" in text


@pytest.mark.parametrize(
    ("loss", "digests", "code"),
    [
        (3.0, ["a"] * 4, 0),
        (3.6, ["a"] * 4, 1),
        (3.0, ["a", "a", "b", "a"], 1),
        (3.0, [None] * 4, 1),
    ],
    ids=["good", "no better", "different", "unknown"],
)
def test_verdict_fails_unless_replicas_agree_and_merging_helps(
    demo: Any, loss: float, digests: list[str | None], code: int
) -> None:
    merged = dataclasses.replace(_figures(demo, 0, loss), digests=digests)
    console = Console(file=io.StringIO(), width=200)
    assert demo.verdict(console, merged, _figures(demo, 1, 3.5)) == code
    last = console.file.getvalue().splitlines()[-1]  # type: ignore[attr-defined]
    assert str(digests[-1]) in last


class _GoingRun:
    """A run that notes what is asked of it."""

    def __init__(self, asked: list[str]) -> None:
        self.asked = asked

    def cancel(self) -> None:
        self.asked.append("cancel")

    def wait(self, timeout: float) -> None:
        self.asked.append(f"wait {timeout:g}")


def test_stop_cancels_all_before_it_waits(demo: Any) -> None:
    asked: list[str] = []
    console = Console(file=io.StringIO())
    demo.stop(console, [_GoingRun(asked), _GoingRun(asked)])
    assert asked == ["cancel", "cancel", "wait 15", "wait 15"]
    assert console.file.getvalue() == "Cancelled both runs.\n"  # type: ignore[attr-defined]


def test_plot_writes_a_picture(demo: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out" / "demo.png"
    console = Console(file=io.StringIO(), width=200)
    demo.plot(console, _figures(demo, 0, 3.0), _figures(demo, 1, 3.5), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in console.file.getvalue()  # type: ignore[attr-defined]
