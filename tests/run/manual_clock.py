"""A clock that only sleep moves."""

from __future__ import annotations

from collections.abc import Callable


class Clock:
    """Seconds since the epoch; ``sleep`` moves it and runs what is scheduled meanwhile."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.naps = 0
        self.scheduled: list[Callable[[], object]] = []

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.naps += 1
        if self.scheduled:
            self.scheduled.pop(0)()
        assert self.naps < 1000, "nobody ends this wait"
