"""TAID's interpolation as training moves it on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from diloco_cloud.composer.losses import TAIDScheduler

_FILE = "composer_taid.json"


class TAIDProgress:
    """Moves a schedule on once an optimizer step, by the mean loss of its micro-batches.

    Args:
        scheduler: None where ``t`` is set by hand.
    """

    def __init__(self, scheduler: TAIDScheduler | None) -> None:
        self.scheduler = scheduler
        self._losses: list[torch.Tensor] = []

    def follow(self, loss: torch.Tensor | None, accelerator: Any, step: int) -> float | None:
        """Take in a micro-batch's part of the step's mean loss.

        Args:
            loss: None where no token was active.
            accelerator: says when the step's last micro-batch is done, and averages over processes.
            step: optimizer steps done.

        Returns:
            The new ``t`` at the end of a step, else None.
        """
        if self.scheduler is None:
            return None
        if loss is not None:
            self._losses.append(loss)
        if not accelerator.sync_gradients:
            return None
        if (total := self._mean(accelerator)) is not None:
            self.scheduler.update_t(total, step)
        return float(self.scheduler.t)

    def save(self, checkpoint: Path) -> None:
        """Write into a checkpoint's folder."""
        if self.scheduler is not None:
            (checkpoint / _FILE).write_text(json.dumps(self.scheduler.state_dict()))

    def load(self, checkpoint: Path) -> float | None:
        """Take over what a checkpoint has; returns its ``t``, or None."""
        path = checkpoint / _FILE
        if self.scheduler is None or not path.exists():
            return None
        self.scheduler.load_state_dict(json.loads(path.read_text()))
        return float(self.scheduler.t)

    def _mean(self, accelerator: Any) -> torch.Tensor | None:
        """Over the processes that had any; every process has to ask."""
        own = torch.zeros(2, device=accelerator.device)
        if self._losses:
            own = torch.stack([torch.stack(self._losses).sum().float(), torch.ones_like(own[0])])
        self._losses.clear()
        total = accelerator.gather(own).view(-1, 2).sum(dim=0)
        return total[0] / total[1] if total[1] > 0 else None
