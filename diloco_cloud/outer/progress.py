"""What a replica knows of its own progress, for its heartbeat and for the round's metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from diloco_cloud.exchange.commit import Decision
from diloco_cloud.store.metered import Usage

Phase: TypeAlias = Literal["joining", "training", "syncing", "finishing", "handing over"]


class Mark(NamedTuple):
    """Tokens and inner steps of a replica's life, up to some moment."""

    tokens: int = 0
    steps: int = 0


@dataclass
class Progress:
    """Where a replica is. Read by the heartbeat's thread, written by the trainer's.

    Attributes:
        phase: what it is doing.
        round: decisions it has seen. step: outer steps it has applied.
        inner_step: inner optimizer steps reported in this life, and those it joined after.
        tokens: reported in this life. loss: last reported. metrics: what else was reported last.
        waiting_for: ranks the open round still lacks.
        excluded: why the last round left this replica's work out, or None.
        missed: rounds decided without this life's work, which it carried on.
    """

    phase: Phase = "joining"
    round: int = 0
    step: int = 0
    inner_step: int = 0
    tokens: int = 0
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    waiting_for: list[int] = field(default_factory=list)
    excluded: str | None = None
    missed: int = 0
    tokens_per_s: float | None = None
    now: Callable[[], float] = time.monotonic
    _rate_mark: tuple[float, int] | None = None
    _steps: int = 0
    _active_at: float = field(init=False)
    _has_stepped: bool = False

    def __post_init__(self) -> None:
        self._active_at = self.now()

    def enter(self, phase: Phase) -> None:
        """Do something else from now on."""
        self.phase = phase
        self._active_at = self.now()

    def touch(self) -> None:
        """Note that the training thread has come to somewhere."""
        self._has_stepped = True
        self._active_at = self.now()

    def report(self, tokens: int, loss: float | None, metrics: Mapping[str, float]) -> None:
        """Count one inner step. Figures may be anything ``float()`` takes, such as tensors."""
        self.inner_step += 1
        self._steps += 1
        self.tokens += int(tokens)
        if loss is not None:
            self.loss = float(loss)
        self.metrics.update({name: float(value) for name, value in metrics.items()})
        self.phase = "training"
        self.touch()

    def resume(self, round_: int, step: int, inner_step: int) -> None:
        """Begin in the middle of a run."""
        self.round, self.step, self.inner_step = round_, step, inner_step
        self.enter("training")
        self.waiting_for = []
        self.mark_round()

    def mark_round(self) -> None:
        """End the open round: its token rate is the tokens since the last mark over the time."""
        now = self.now()
        if self._rate_mark is not None and now > self._rate_mark[0]:
            self.tokens_per_s = (self.tokens - self._rate_mark[1]) / (now - self._rate_mark[0])
        self._rate_mark = (now, self.tokens)
        self.waiting_for = []

    def mark(self) -> Mark:
        """How much has been processed until now, in this life."""
        return Mark(self.tokens, self._steps)

    def snapshot(self) -> dict[str, Any]:
        """The public fields as JSON values.

        And ``idle_s``, seconds since the last inner step or the last change of phase: by this
        machine's monotonic clock, so that no reader has to trust another's. It is 0 until the first
        step of this life, which may wait for compilation, or for data to be skipped.
        """
        idle_s = self.now() - self._active_at if self._has_stepped else 0.0
        return {
            "state": self.phase,
            "round": self.round,
            "step": self.step,
            "inner_step": self.inner_step,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "loss": self.loss,
            "reward": self.metrics.get("reward"),
            "waiting_for": list(self.waiting_for),
            "excluded": self.excluded,
            "missed": self.missed,
            "idle_s": round(max(0.0, idle_s), 3),
        }


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """One decided round as one replica saw it.

    Attributes:
        seconds_blocked: time the training thread stood still for the exchange.
        seconds_exchange: from contributing to having the result, in the background.
        usage: requests and bytes of the exchange.
        base: digest of the global parameters before the round.
    """

    round: int
    step: int
    fragment: int
    decision: Decision
    participants: int
    seconds_blocked: float
    seconds_exchange: float
    usage: Usage
    base: str
    progress: dict[str, Any]
    metrics: dict[str, float]
