"""The same seed gives the same faults, whatever the threads do."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from diloco_cloud.errors import StoreError
from diloco_cloud.store import open_driver
from diloco_cloud.store.faults import Faults, FaultyStore, weather

FAULTS = Faults(
    seed=11, throttled=0.1, timeout=0.1, lost_reply=0.1, duplicate=0.1, torn=0.1, expired=0.1
)
Outcomes = list[str]


def _store(
    faults: Faults = FAULTS, *, rank: int = 0, attempt: int = 0, bucket: str | None = None
) -> FaultyStore:
    driver = open_driver(f"memory://{bucket or uuid.uuid4().hex}")
    return FaultyStore(driver, faults, rank=rank, attempt=attempt)


def _outcomes(store: FaultyStore, key: str) -> Outcomes:
    """What a fixed sequence of requests for one key meets."""
    calls: Sequence[Callable[[], object]] = (
        lambda: store.put(key, b"1"),
        lambda: store.create(key, b"2"),
        lambda: store.get(key),
        lambda: store.delete(key),
    )
    seen: Outcomes = []
    for call in calls * 20:
        try:
            call()
            seen.append("done")
        except StoreError as error:
            seen.append(str(error).partition("(")[2] or type(error).__name__)
    return seen


def _alone(store: FaultyStore, keys: Sequence[str]) -> dict[str, Outcomes]:
    return {key: _outcomes(store, key) for key in keys}


def test_replay_is_the_same_in_another_store_and_order() -> None:
    keys = [f"k{i}" for i in range(8)]
    first = _store()
    expected = _alone(first, keys)
    again = _store()
    assert _alone(again, keys[::-1]) == expected
    assert again.injected == first.injected
    assert len({tuple(seen) for seen in expected.values()}) == len(keys)


def test_replay_does_not_depend_on_how_threads_take_turns() -> None:
    keys = [f"k{i}" for i in range(8)]
    expected = _alone(_store(), keys)
    for order in range(3):
        random.Random(order).shuffle(keys)
        with ThreadPoolExecutor(8) as pool:
            seen = pool.map(partial(_outcomes, _store()), keys)
        assert dict(zip(keys, seen, strict=True)) == expected


@pytest.mark.parametrize(
    ("faults", "rank", "attempt"),
    [
        (Faults(seed=12, throttled=0.3), 0, 0),
        (Faults(seed=11, throttled=0.3), 1, 0),
        (Faults(seed=11, throttled=0.3), 0, 1),
    ],
)
def test_other_seed_rank_or_attempt_meets_other_faults(
    faults: Faults, rank: int, attempt: int
) -> None:
    reference = _outcomes(_store(Faults(seed=11, throttled=0.3)), "k")
    assert _outcomes(_store(faults, rank=rank, attempt=attempt), "k") != reference


def test_one_fault_does_not_move_the_others() -> None:
    some, more = _store(Faults(seed=5, throttled=0.2)), _store(Faults(seed=5, throttled=0.4))
    seen = zip(_outcomes(some, "k"), _outcomes(more, "k"), strict=True)
    assert all(b != "done" for a, b in seen if a.startswith("injected"))


def test_child_throws_the_dice_of_its_parent() -> None:
    assert _outcomes(_store().child("runs/one"), "k") == _outcomes(_store(), "runs/one/k")


def test_environment_tells_the_rank_and_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLICA_RANK", "3")
    monkeypatch.setenv("DILOCO_ATTEMPT", "2")
    here = FaultyStore(open_driver(f"memory://{uuid.uuid4().hex}"), FAULTS)
    assert _outcomes(here, "k") == _outcomes(_store(rank=3, attempt=2), "k")


def test_memory_of_past_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weather, "_COUNTED", 100)
    store = _store(Faults(seed=1, throttled=0.5))
    for i in range(300):
        _outcomes(store, f"k{i}")
    assert len(store._weather._seen) == 100
