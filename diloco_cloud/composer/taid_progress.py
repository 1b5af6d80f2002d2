"""TAID's interpolation as training moves it on."""

from __future__ import annotations

import json
from pathlib import Path

from diloco_cloud.composer.losses import TAIDScheduler
from diloco_cloud.composer.losses.checks import require

_FILE = "composer_taid.json"


class TAIDProgress:
    """Moves a schedule on once an optimizer step, by the mean loss of its hinted tokens.

    Args:
        scheduler: None where ``t`` is set by hand.
    """

    def __init__(self, scheduler: TAIDScheduler | None) -> None:
        self.scheduler = scheduler
        self._total, self._active = 0.0, 0.0

    def start(self, taid_t: float | None, wrapper: str) -> float | None:
        """The first ``t``: the schedule's, or the one that was given.

        Args:
            taid_t: set by hand, or None.
            wrapper: of channel 2.

        Raises:
            ConfigError: there is a schedule, and a ``taid_t`` too or no TAID.
        """
        if self.scheduler is None:
            return taid_t
        require(
            wrapper == "taid",
            f"there is a taid_scheduler, and sdpo_wrapper={wrapper!r} does not read it",
            fix="Set sdpo_wrapper='taid', or leave taid_scheduler out.",
        )
        require(
            taid_t is None,
            f"taid_t is {taid_t}, and taid_scheduler sets t too",
            fix="Leave one of the two out; TAIDScheduler(t_start=…) is where t begins.",
        )
        return float(self.scheduler.t)

    def follow(self, loss: float, active: float, step: int, *, ends_step: bool) -> float | None:
        """Take in a micro-batch, as it is over all processes.

        Args:
            loss: mean over its hinted tokens, in nats.
            active: how many these are; without any, ``loss`` has no meaning.
            step: optimizer steps done.
            ends_step: whether it is the step's last micro-batch.

        Returns:
            The new ``t`` at the end of a step, else None.
        """
        if self.scheduler is None:
            return None
        if active:
            self._total, self._active = self._total + loss * active, self._active + active
        if not ends_step:
            return None
        if self._active:
            self.scheduler.update_t(self._total / self._active, step)
        self._total, self._active = 0.0, 0.0
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
