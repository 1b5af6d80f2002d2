"""A clock that only moves when someone sleeps."""

from __future__ import annotations

from typing import Any

from diloco_cloud.store import RetryPolicy


class FakeTime:
    """Attributes: now: seconds. sleeps: what was slept, in order."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    def policy(self, **settings: Any) -> RetryPolicy:
        """A policy on this clock whose jitter is the longest wait."""
        return RetryPolicy(
            jitter=lambda _low, high: high, sleep=self.sleep, clock=self.clock, **settings
        )
