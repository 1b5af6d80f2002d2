"""The trainer's figures: summed over processes and micro-batches until a log takes them.

What is logged is a mean over tokens or pairs, not over micro-batches: batches differ in how many
of their rows have a hint. Every process must add the same micro-batches in the same order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from accelerate.utils import gather_object  # type: ignore[import-untyped]

from diloco_cloud.composer.activity import ChannelActivity
from diloco_cloud.composer.channels import ChannelLoss

Mode = Literal["train", "eval"]

#: What :attr:`ChannelLoss.metrics` may hold: one layout for all processes, also the idle ones.
_FIGURES = {
    "sdpo": ("loss", "clipped", "per_token_max"),
    "replay": ("loss", "margin", "accuracy"),
}


class ChannelMetrics:
    """Figures and counters of the channels, the same on every process.

    Args:
        accelerator: gathers.

    Attributes:
        activity: counters of channels 2 and 3, by name.
    """

    def __init__(self, accelerator: Any) -> None:
        self.activity = {name: ChannelActivity(name) for name in _FIGURES}
        self._accelerator = accelerator
        self._windows: dict[Mode, _Window] = {"train": _Window(), "eval": _Window()}

    def add(self, channel: str, found: ChannelLoss, mode: Mode) -> tuple[float, int]:
        """Take in a micro-batch.

        Args:
            channel: "sdpo" or "replay".
            found: what this process made of it.
            mode: counters are of training only.

        Returns:
            The mean loss over the active tokens or pairs of all processes (0 without any), and
            how many these are.
        """
        names = _FIGURES[channel]
        own: list[torch.Tensor | float] = [found.active, found.tokens, found.skipped]
        own += [found.metrics.get(name, math.nan) for name in names]
        rows = self._gather(own)
        active, tokens, skipped = (round(sum(row[i] for row in rows)) for i in range(3))
        window = self._windows[mode]
        for column, name in enumerate(names, start=3):
            values = [(row[column], row[0]) for row in rows if row[0]]
            # An option may leave a figure out; a loss that is no number shall be seen.
            if name == "loss" or not any(math.isnan(value) for value, _ in values):
                window.add(f"{channel}/{name}", values)
        if mode == "train":
            self.activity[channel].count(
                active=active, tokens=tokens, skipped=skipped, idle=found.idle
            )
        total = sum(row[3] * row[0] for row in rows if row[0])
        return (total / active if active else 0.0), active

    def add_mean(self, name: str, value: torch.Tensor, mode: Mode) -> None:
        """Take in a figure of a micro-batch that has no tokens to weigh it by."""
        self._windows[mode].add(name, [(row[0], 1.0) for row in self._gather([value])])

    def skip(self, channel: str, reasons: Mapping[str, int]) -> None:
        """Count rows that never came into a micro-batch, by reason."""
        found = [dict(reasons)]
        if self._accelerator.num_processes > 1:
            found = gather_object(found)
        for one in found:
            self.activity[channel].skip(one)

    def take(self, mode: Mode) -> dict[str, float]:
        """The figures since the last call, by ``channel/name``."""
        window, self._windows[mode] = self._windows[mode], _Window()
        return window.figures()

    def _gather(self, own: Sequence[torch.Tensor | float]) -> list[list[float]]:
        """One row from each process."""
        device = self._accelerator.device
        row = torch.stack([torch.as_tensor(v, dtype=torch.float32, device=device) for v in own])
        found: list[list[float]] = self._accelerator.gather(row).view(-1, len(own)).tolist()
        return found


class _Window:
    """Weighted means, and for names in ``_max`` maxima."""

    def __init__(self) -> None:
        self._seen: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    def add(self, name: str, values: Sequence[tuple[float, float]]) -> None:
        """Add values, each with its weight above 0."""
        self._seen[name].extend(values)

    def figures(self) -> dict[str, float]:
        """What was added; nothing for names that never had a value."""
        return {
            name: max(value for value, _ in seen)
            if name.endswith("_max")
            else sum(value * weight for value, weight in seen) / sum(weight for _, weight in seen)
            for name, seen in self._seen.items()
            if seen
        }
