"""What waiting costs: each look at the store is a request."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Literal

import pytest
import torch

from diloco_cloud.errors import RoundTimeoutError
from diloco_cloud.exchange.history import History, Standing
from diloco_cloud.exchange.membership import Lateness, Life, Membership
from diloco_cloud.exchange.rounds import RoundExchange
from diloco_cloud.exchange.watch import Clock, Watch
from diloco_cloud.exchange.work import Work
from diloco_cloud.store.memory import MemoryStore
from diloco_cloud.store.metered import MeteredStore


class Time:
    """Passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.at = 0.0
        self.clock = Clock(now=lambda: self.at, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.at += seconds


def looks(expected_s: float | None, until_s: float) -> int:
    time = Time()
    watch = Watch(time.clock, 1000.0, longest_s=1.0, expected_s=expected_s)
    found = 1
    while watch.waited_s < until_s:
        watch.pause()
        found += 1
    return found


def test_a_wait_that_was_foreseen_takes_few_looks() -> None:
    assert looks(5.0, 5.0) < looks(None, 5.0) / 2


def test_a_wait_is_paced_as_ever_where_nothing_is_known() -> None:
    time = Time()
    watch = Watch(time.clock, 1000.0, longest_s=1.0)
    for waited, pause in [(0.0, 0.01), (1.0, 0.1), (50.0, 1.0), (999.5, 0.5)]:
        time.at = waited
        watch.pause()
        assert time.at == pytest.approx(waited + pause)
    time.at = 50.0
    watch.pause(0.2)
    assert time.at == pytest.approx(50.2)


def alone(quorum: Literal["all"] | int, waits_s: float) -> tuple[int, MeteredStore]:
    """How often the roster was asked by a replica whose peer never comes; its requests."""
    time, asked = Time(), 0

    def roster() -> Mapping[int, Life]:
        nonlocal asked
        asked += 1
        return {0: "alive", 1: "starting"}

    store = MeteredStore(MemoryStore(uuid.uuid4().hex))
    own = RoundExchange(
        store, "run", 0, 2, timeout_s=100.0, join_timeout_s=waits_s, clock=time.clock
    )
    own.membership = Membership(2, quorum=quorum, heartbeat_s=5.0, roster=roster)
    with pytest.raises(RoundTimeoutError):
        own.exchange(0, 0, [torch.ones(3)])
    return asked, store


def test_who_has_begun_is_asked_once_a_heartbeat() -> None:
    """All are needed, this one is late, and its job may be queueing somewhere."""
    asked, store = alone("all", 600.0)
    assert 2 <= asked <= 500 / 5 + 1
    assert store.usage.requests["list"] < 700


def test_who_lives_is_asked_more_rarely_the_longer_the_wait() -> None:
    asked, _ = alone(2, 1800.0)
    assert 2 <= asked <= 60  # rather than 360


@pytest.mark.parametrize("life", ["alive", "starting", "gone"])
def test_one_that_is_known_to_be_dead_is_waited_for_no_longer_than_it_usually_needs(
    life: Life,
) -> None:
    usual_s = 1.0
    time, store = Time(), MemoryStore(uuid.uuid4().hex)
    past = History(
        standings={r: Standing(rank=r, attempt=0, round=-1, position=0) for r in range(3)}
    )
    RoundExchange(store, "run", 1, 3).contribute(0, 0, [torch.ones(3)], Work())
    own = RoundExchange(store, "run", 0, 3, clock=time.clock)
    rules = Membership(3, quorum=None, heartbeat_s=20.0, roster=lambda: {2: life})
    rules.round_s, rules._lateness[2] = 100.0, Lateness(mean=usual_s, deviation=0.0)
    assert rules.free_s > 2.0
    own.membership = rules
    own.begin(past)
    result = own.exchange(0, 0, [torch.ones(3)])
    assert [one.rank for one in result.commit.contributors] == [0, 1]
    longest_s = usual_s + rules.free_s if life == "alive" else usual_s
    assert time.at == pytest.approx(longest_s, abs=0.3)
