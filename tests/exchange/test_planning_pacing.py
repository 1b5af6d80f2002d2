"""What waiting costs in requests and in time."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diloco_cloud.exchange.pacing import Pace
from diloco_cloud.exchange.watch import Clock, Watch
from diloco_cloud.store.memory import MemoryStore
from diloco_cloud.store.metered import MeteredStore
from diloco_cloud.store.prices import cost


class Time:
    """A clock that only moves when someone sleeps, and what happens at some moment."""

    def __init__(self, at: float, event: Callable[[], None]) -> None:
        self.now = 0.0
        self._at, self._event = at, event

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self._at:
            self._event()
            self._at = float("inf")

    def clock(self) -> Clock:
        return Clock(lambda: self.now, self.sleep)


def wait(event_at: float, pause: Callable[[Watch], None]) -> tuple[MeteredStore, float]:
    """Wait for an object that appears at some time; the store that was asked, and the delay."""
    memory = MemoryStore(uuid.uuid4().hex)
    store = MeteredStore(memory)
    time = Time(event_at, lambda: memory.put("round/commit", b""))
    watch = Watch(time.clock(), timeout_s=1e9, longest_s=1.0)
    while not store.list("round/"):
        pause(watch)
    return store, time.now - event_at


def paced(pace: Pace) -> Callable[[Watch], None]:
    """What takes the place of ``Watch.pause``."""
    return lambda watch: watch.clock.sleep(pace.pause_s(watch.waited_s))


@pytest.mark.parametrize("seconds", [0.05, 1.0, 10.0, 60.0, 600.0])
def test_a_watch_is_late_by_a_tenth_at_most_and_costs_next_to_nothing(seconds: float) -> None:
    store, late = wait(seconds, Watch.pause)
    assert late <= max(0.01, min(0.1 * seconds, 1.0)) * (1 + 1e-9)
    looks = store.usage.requests
    assert set(looks) == {"list"}
    assert looks["list"] == Pace().looks(seconds)
    dollars = cost(store.usage, "s3://bucket")
    assert dollars is not None
    assert dollars < 0.02 * seconds / 3600 + 3e-4  # an hour of a processor costs far more


@pytest.mark.parametrize("seconds", [1.0, 10.0, 60.0, 600.0])
def test_a_foreseen_event_takes_fewer_looks_and_is_seen_sooner(seconds: float) -> None:
    blind, blind_late = wait(seconds * 1.003, Watch.pause)
    seeing, late = wait(seconds * 1.003, paced(Pace(expected_s=seconds)))
    assert late <= max(0.01, 0.01 * seconds) * (1 + 1e-9)
    if seconds <= 10.0:  # else both are bound by the longest pause
        assert seeing.usage.requests["list"] <= 0.6 * blind.usage.requests["list"]
    assert seeing.usage.requests["list"] < blind.usage.requests["list"] or late < blind_late
    patient, late = wait(seconds * 1.003, paced(Pace(longest_s=60.0, expected_s=seconds)))
    assert patient.usage.requests["list"] <= 22
    assert late <= max(0.01, 0.01 * seconds) * (1 + 1e-9)


@given(st.floats(0.01, 1e4), st.floats(0.01, 1e4), st.floats(0.02, 1e3))
@example(10.0, 8.0, 1.0)
@example(10.0, 20.0, 1.0)
def test_no_wait_is_late_by_more_than_it_was_expected_or_overdue(
    expected: float, seconds: float, longest: float
) -> None:
    pace = Pace(longest_s=longest, expected_s=expected)
    waited = 0.0
    for _ in range(3_000):
        if waited >= seconds:
            break
        waited += pace.pause_s(waited)
    else:
        return  # too long for a test; the pauses are bounded as ever
    late = waited - seconds
    bound = 0.1 * expected if seconds < 0.9 * expected else 0.01 * expected
    bound = max(bound, 0.1 * (seconds - expected), 0.01)
    assert late <= min(bound, longest) * (1 + 1e-6) + 1e-9


@given(
    st.floats(0, 500), st.none() | st.floats(0.01, 800), st.floats(0.02, 60), st.floats(1e-3, 0.02)
)
def test_looks_are_counted_without_stepping_through_them(
    seconds: float, expected: float | None, longest: float, shortest: float
) -> None:
    pace = Pace(shortest_s=shortest, longest_s=longest, expected_s=expected)
    waited, looks = 0.0, 1
    while waited < seconds:
        waited += pace.pause_s(waited)
        looks += 1
    assert abs(pace.looks(seconds) - looks) <= 1 + looks // 1000  # sums of many pauses are rounded


@pytest.mark.parametrize("expected", [None, 1.0, 1e7, 1e12])
def test_looks_of_ages_are_counted_at_once(expected: float | None) -> None:
    assert Pace(expected_s=expected).looks(1e9) >= 9e8 * (1 if expected != 1e12 else 0.9)


def test_pauses_keep_within_their_bounds() -> None:
    pace = Pace(shortest_s=0.5, longest_s=2.0, expected_s=10.0)
    assert pace.pause_s(0.0) == 1.0
    assert pace.pause_s(9.5) == 0.5
    assert pace.pause_s(1000.0) == 2.0
    assert Pace(shortest_s=0.5, longest_s=2.0).pause_s(0.0) == 0.5
