"""How often the open round is looked at."""

from __future__ import annotations

import pytest

from diloco_cloud.exchange.membership import Membership
from diloco_cloud.exchange.rounds import RoundExchange
from diloco_cloud.outer.lookout import Lookout
from diloco_cloud.store.memory import MemoryStore


class StillClock:
    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


def lookout(clock: StillClock) -> Lookout:
    exchange = RoundExchange(MemoryStore("t"), "run", 0, 2, clock=clock)  # type: ignore[arg-type]
    exchange.membership = Membership(2, quorum=None)
    return Lookout(exchange)


def test_a_new_life_looks_often_while_its_own_round_would_be_short() -> None:
    """It knows of no round's length, and short rounds end before a second has passed."""
    clock = StillClock()
    watcher = lookout(clock)
    for _ in range(3):
        watcher.step(5, 0, steps_left=160)
        clock.at += 0.05
    watcher.close()
    assert watcher.exchange.membership.round_s is None
    assert watcher._period_s == pytest.approx(0.01 * (0.15 + 160 * 0.05))


def test_a_new_life_in_a_long_round_looks_once_a_poll_interval() -> None:
    clock = StillClock()
    watcher = lookout(clock)
    for _ in range(3):
        watcher.step(5, 0, steps_left=500)
        clock.at += 1.0
    watcher.close()
    assert watcher._period_s == watcher.exchange.poll_interval_s


def test_a_long_round_is_looked_at_twenty_times() -> None:
    clock = StillClock()
    watcher = lookout(clock)
    watcher.exchange.membership.round_s = 1800.0
    watcher.step(5, 0, steps_left=500)
    watcher.close()
    looks = 0
    while clock.at < 1800.0:
        clock.at += watcher._period_s
        looks += 1
    assert looks <= 21


def test_a_short_round_is_looked_at_as_often_as_it_takes() -> None:
    clock = StillClock()
    watcher = lookout(clock)
    watcher.exchange.poll_interval_s = 0.01
    watcher.exchange.membership.round_s = 0.1
    watcher.step(5, 0, steps_left=5)
    watcher.close()
    clock.at += 0.09
    assert watcher._period_s == pytest.approx(0.01)
