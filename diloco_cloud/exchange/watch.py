"""Waiting for what others write: time, and the looks at the store while it passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_cloud.errors import ExchangeError
from diloco_cloud.exchange.pacing import Pace


@dataclass(frozen=True)
class Clock:
    """Time as the exchange sees it; tests pass their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass
class Watch:
    """Paces the looks at a directory, each a billed request; see :class:`~.pacing.Pace`.

    Attributes:
        timeout_s: after so many seconds the wait has been too long.
        shortest_s, longest_s: of the pauses.
        stopped: lets another thread end the wait.
        expected_s: how long the wait is expected to be; None where nothing is known.
    """

    clock: Clock
    timeout_s: float
    longest_s: float
    shortest_s: float = 0.01
    stopped: Callable[[], bool] = lambda: False
    expected_s: float | None = None
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock.now()

    @property
    def waited_s(self) -> float:
        return self.clock.now() - self.started

    @property
    def expired(self) -> bool:
        return self.waited_s >= self.timeout_s

    def pause(self, at_most_s: float | None = None) -> None:
        waited = self.waited_s
        longest = min(self.longest_s, max(self.timeout_s - waited, self.shortest_s))
        if at_most_s is not None:
            longest = min(longest, max(at_most_s, self.shortest_s))
        pace = Pace(min(self.shortest_s, longest), longest, self.expected_s)
        self.clock.sleep(pace.pause_s(waited))
        if self.stopped():
            raise ExchangeError("the wait for other replicas was given up")
