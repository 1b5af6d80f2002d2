"""When TAID moves its target from the student to the teacher."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diloco_cloud.composer.losses.checks import require, unit_interval
from diloco_cloud.errors import ConfigError


class TAIDScheduler:
    """The interpolation ``t`` of TAID, never falling, never above ``t_end``.

    Shing et al., arXiv:2501.16937, Sec. 3.3, as SakanaAI/TAID runs it. From the relative change
    of the loss δ, with momentum m ← β·m + (1-β)·δ, one step raises t by α·σ(m)·(1-t), or to the
    linear schedule ``t_start + (t_end - t_start)·step/steps`` where that is higher. The first
    loss only seeds δ. Two differences from that code, both on purpose: ``t_end`` bounds t also
    with ``disable_adaptive``, where theirs runs on above 1 past the last step, and a loss that
    is not finite is passed over, where theirs never recovers from a NaN.

    **Between replicas** t must be one number, for the averaged model was trained towards one
    target. The composer replica takes :meth:`linear` at the run's agreed step, a pure function,
    so nothing has to be agreed on. A loop of your own that lets each replica move its t by its own
    losses calls :meth:`agree` on every replica when a round commits, with the same number: the
    mean or the greatest of the contributors' t. This class knows no rounds.

    ``state_dict`` and ``load_state_dict`` carry everything that moves, as plain numbers, and
    the schedule's constants, so that a resumed run refuses another schedule's state.

    Args:
        num_train_steps: optimizer steps planned; the linear schedule ends there.
        t_start: in [0, 1).
        t_end: in (0, 1], not below ``t_start``.
        alpha: in [0, 1].
        beta: momentum, in [0, 1].
        disable_adaptive: follow the linear schedule only.
        device: of the increments that :meth:`update_t` returns.

    Raises:
        ConfigError: a value out of its range.
    """

    def __init__(
        self,
        num_train_steps: int,
        *,
        t_start: float = 0.4,
        t_end: float = 1.0,
        alpha: float = 5e-4,
        beta: float = 0.99,
        disable_adaptive: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        require(num_train_steps >= 1, f"num_train_steps is {num_train_steps}", fix="Plan a step.")
        for name, value in (("t_start", t_start), ("t_end", t_end), ("alpha", alpha)):
            unit_interval(value, name)
        unit_interval(beta, "beta")
        require(
            t_start <= t_end and t_start < 1.0 and t_end > 0.0,
            f"t goes from {t_start} to {t_end}",
            fix="Let it rise, from below 1 to above 0.",
        )
        self.num_train_steps = num_train_steps
        self.t_start, self.t_end = t_start, t_end
        self.alpha, self.beta = alpha, beta
        self.disable_adaptive = disable_adaptive
        self.device = torch.device(device)
        self._t = t_start
        self._agreed = t_start
        self._momentum = 0.0
        self._previous: float | None = None

    @property
    def t(self) -> float:
        """The interpolation of the next step."""
        return self._t

    def linear(self, global_step: int) -> float:
        """The linear schedule at a step: a pure function, the same on every replica."""
        progress = min(max(global_step / self.num_train_steps, 0.0), 1.0)
        return self.t_start + (self.t_end - self.t_start) * progress

    def update_t(self, loss: Tensor | float, global_step: int) -> Tensor | None:
        """Take in the loss of a step.

        Args:
            loss: scalar, the TAID loss.
            global_step: optimizer steps done.

        Returns:
            The adaptive increment, scalar and not negative (also computed, and not applied, with
            ``disable_adaptive``); None for the first finite loss and for any that is not.
        """
        value = float(loss)
        if not math.isfinite(value):
            return None
        previous, self._previous = self._previous, value
        if previous is None:
            return None
        change = (previous - value) / (previous + 1e-15)
        self._momentum = self.beta * self._momentum + (1.0 - self.beta) * change
        increment = self.alpha * _sigmoid(self._momentum) * (1.0 - self._t)
        reached = self._t if self.disable_adaptive else self._t + increment
        self._t = min(self.t_end, max(self._t, reached, self.linear(global_step)))
        return torch.tensor(increment, dtype=torch.float32, device=self.device)

    def agree(self, t: float) -> None:
        """Take the t that a committed round gives every replica.

        It replaces this replica's own, also where that had run ahead: agreement comes first, and
        what never falls is the agreed t. Above ``t_end`` it counts as ``t_end``.

        Args:
            t: the same on every replica.

        Raises:
            ConfigError: ``t`` is no number, or below one agreed before.
        """
        require(math.isfinite(t), f"the agreed t is {t}", fix="Agree on finite numbers only.")
        t = min(t, self.t_end)
        require(
            t >= self._agreed,
            f"the agreed t is {t}, and {self._agreed} was agreed before",
            fix="Agree on rounds in their order, by a rule that never falls.",
        )
        self._t = self._agreed = t

    def state_dict(self) -> dict[str, Any]:
        """Everything that moves, and the schedule it belongs to, as plain numbers."""
        return {
            "t": self._t,
            "agreed": self._agreed,
            "momentum": self._momentum,
            "previous_loss": self._previous,
            "schedule": self._schedule(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            ConfigError: the state lacks a part, or belongs to another schedule.
        """
        try:
            schedule = dict(state["schedule"])
            moving = (float(state["t"]), float(state["agreed"]), float(state["momentum"]))
            previous = state["previous_loss"]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"this is no state of a TAIDScheduler ({error!r})", fix="Pass its state_dict()."
            ) from error
        require(
            schedule == self._schedule(),
            f"the state belongs to the schedule {schedule}, this one is {self._schedule()}",
            fix="Build the scheduler with the arguments of the run that is resumed.",
        )
        self._t, self._agreed, self._momentum = moving
        self._previous = None if previous is None else float(previous)

    def _schedule(self) -> dict[str, Any]:
        names = ("num_train_steps", "t_start", "t_end", "alpha", "beta", "disable_adaptive")
        return {name: getattr(self, name) for name in names}


def _sigmoid(x: float) -> float:
    # One sign at a time: exp of a great number overflows.
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))
