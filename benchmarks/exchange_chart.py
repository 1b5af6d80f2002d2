"""The picture of what was measured, for the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from exchange_results import Result
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

#: The same results give the same file, and text stays text.
_STYLE = {"svg.hashsalt": "exchange", "svg.fonttype": "none", "font.size": 8}

_COLOURS = {"ours": "#2a6fbb", "reference": "#b8b8b8"}
_NAMES = {
    "reference": "reference, tensor by tensor",
    "reference-one-object": "reference, one object",
    "reference-fast": "reference, raw bytes",
}


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw seconds by contender, one panel per shaped store and cell, slowest first.

    A tick in a bar is its limit.
    """
    shaped = [one for one in results if one.mbit_s is not None] or list(results)
    panels: dict[tuple[str, int, float], list[Result]] = {}
    for one in shaped:
        if one.kind != "limit":
            panels.setdefault((one.store, one.replicas, one.mib), []).append(one)
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    height = 0.9 + 0.22 * max(map(len, panels.values()))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.5 * columns, height * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flat
        for axis, ((store, replicas, mib), bars) in zip(axes, panels.items(), strict=False):
            _panel(axis, bars)
            axis.set_title(f"N = {replicas}, S = {mib:g} MiB; {store}")
        for axis in list(axes)[len(panels) :]:
            axis.remove()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(axis: Axes, bars: list[Result]) -> None:
    bars = sorted(bars, key=lambda one: one.seconds)
    for at, one in enumerate(bars):
        axis.barh(at, one.seconds, color=_COLOURS[one.kind], height=0.72)
        axis.text(one.seconds * 1.04, at, f"{one.seconds:.3g} s", va="center")
        if one.limit_s:
            axis.plot([one.limit_s] * 2, [at - 0.36, at + 0.36], color="black", linewidth=1.5)
    axis.set_yticks(range(len(bars)), [_NAMES.get(one.name, one.name) for one in bars])
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _at: f"{value:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlim(
        0.5 * min(one.limit_s or one.seconds for one in bars), 2 * max(one.seconds for one in bars)
    )
    axis.set_xlabel("seconds a round; the black tick is the limit for the bytes moved")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
