"""The demo's picture: what merging does to the loss."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed to write a file

from demo_figures import RunFigures
from matplotlib import pyplot
from matplotlib.axes import Axes

_MERGED, _LONE, _GREY = "#1769aa", "#c2571a", "#8a94a0"


def draw(merged: RunFigures, lone: RunFigures, path: Path) -> None:
    """Write a PNG of validation and training loss against inner steps.

    Args:
        merged: the run of several replicas.
        lone: the run of one.
        path: where to.
    """
    figure, axes = pyplot.subplots(figsize=(9, 5.2), dpi=150, layout="constrained")
    for rank, curve in enumerate(merged.training):
        label = f"training loss, each of {len(merged.training)} replicas" if rank == 0 else None
        axes.plot(*zip(*curve, strict=True), color=_GREY, lw=0.7, alpha=0.6, label=label)
    _validation(axes, lone, _LONE, "1 replica alone")
    _validation(axes, merged, _MERGED, f"{merged.spec.replicas} replicas, merged")
    axes.set_xlabel("inner steps per replica")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(
        f"{merged.spec.replicas} replicas, merged every {merged.spec.sync_every} steps: "
        f"held-out perplexity {merged.perplexity:.1f}; one alone: {lone.perplexity:.1f}",
        loc="left",
        fontsize=11,
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _validation(axes: Axes, run: RunFigures, colour: str, name: str) -> None:
    steps, losses = zip(*run.validation, strict=True)
    axes.plot(steps, losses, color=colour, lw=2, label=f"held-out loss, {name}")
    axes.plot(steps[-1], losses[-1], "o", color=colour, ms=5)
