"""Counting volunteer reducers by the store's clock, and a reducer's view of the run's end."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from typing import Any

import pytest

from diloco_cloud import keys
from diloco_cloud.errors import UnreachableError
from diloco_cloud.replica.run_end import SILENCE_S, RunEnd
from diloco_cloud.replica.volunteers import Volunteers
from diloco_cloud.run.record import create_run
from diloco_cloud.run.spec import RunSpec
from diloco_cloud.store.base import ObjectInfo, ObjectStore
from diloco_cloud.store.memory import MemoryStore

BEAT_S = 5.0


class Timed(MemoryStore):
    """Tells times that the test decides, and counts its listings."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.times: dict[str, float] = {}
        self.lists = 0

    def at(self, key: str, time: float, data: bytes = b"{}") -> None:
        self.put(key, data)
        self.times[key] = time

    def head(self, key: str) -> ObjectInfo:
        found = super().head(key)
        return replace(found, last_modified=self.times.get(key, found.last_modified))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        self.lists += 1
        found = super().list(prefix)
        return [replace(i, last_modified=self.times.get(i.key, i.last_modified)) for i in found]


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _volunteers(name: str, clock: Clock) -> tuple[Timed, Timed, Volunteers]:
    run, reducers = Timed(name), Timed(f"{name}/{keys.REDUCERS}")
    return run, reducers, Volunteers(reducers, 0, run, BEAT_S, now=clock)


def test_volunteers_are_those_whose_signs_are_fresh(name: str, clock: Clock) -> None:
    run, reducers, view = _volunteers(name, clock)
    run.at(keys.alive(0), 1000.0)
    for index, age in enumerate((1.0, 18.0, 17.0)):
        reducers.at(keys.alive(index), 1000.0 - age)
    assert view() == 2
    assert [view.place(index) for index in range(3)] == [0, 1, 1]


def test_volunteers_that_all_died_are_none(name: str, clock: Clock) -> None:
    """Though the newest of their signs is as fresh as ever, compared with itself."""
    run, reducers, view = _volunteers(name, clock)
    reducers.at(keys.alive(0), 1000.0)
    run.at(keys.alive(0), 1000.0)
    assert view() == 1
    run.at(keys.alive(0), 1020.0)
    clock.time += BEAT_S
    assert view() == 0


def test_volunteers_are_counted_once_a_heartbeat_at_most(name: str, clock: Clock) -> None:
    _, reducers, view = _volunteers(name, clock)
    for _ in range(10):
        view()
        clock.time += BEAT_S / 10
    assert reducers.lists == 1
    view()
    assert reducers.lists == 2


def test_volunteers_that_cannot_be_counted_are_none(name: str, clock: Clock) -> None:
    class Down(Timed):
        def list(self, prefix: str = "") -> list[ObjectInfo]:
            raise UnreachableError("the store does not answer")

    assert Volunteers(Down(name), 0, Timed(name), BEAT_S, now=clock)() == 0


def _end(store: ObjectStore, clock: Clock, **settings: Any) -> RunEnd:
    spec = RunSpec(run_id="run-1", replicas=2, rounds=4, reducers=1, **settings)
    create_run(store, spec, created_at=0.0)
    for rank in range(2):
        store.create(keys.intent(rank, 0), b"{}")
    return RunEnd(store, spec, now=clock)


def _look(end: RunEnd, clock: Clock, after: float = 1000 * BEAT_S) -> bool:
    clock.time += after
    return end()


def _outcome(store: ObjectStore, rank: int, *, restartable: bool = False) -> None:
    store.create(keys.outcome(rank, 0), json.dumps({"restartable": restartable}).encode())


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_run_is_over_when_all_have_ended_for_good(
    name: str, clock: Clock, max_restarts: int
) -> None:
    store = MemoryStore(name)
    end = _end(store, clock, max_restarts=max_restarts)
    assert not end()
    _outcome(store, 0)
    assert not _look(end, clock, 4 * BEAT_S)
    _outcome(store, 1, restartable=True)
    assert _look(end, clock, 4 * BEAT_S) == (max_restarts == 0)
    store.create(keys.intent(1, 1), b"{}")
    store.create(keys.cancel(1, 1), b"{}")
    assert _look(end, clock, 4 * BEAT_S)
    assert (end.why, end.unheard) == ("all replicas have ended", False)


def test_a_run_is_over_when_its_last_round_is_exported(name: str, clock: Clock) -> None:
    """Though somebody was killed, and has not said that it ended."""
    store = MemoryStore(name)
    end = _end(store, clock)
    _outcome(store, 0)
    store.put(keys.result(3, "ab") + keys.RESULT_MANIFEST, b'{"round": 3}')
    assert not end()
    store.put(keys.result(4, "cd") + keys.RESULT_MANIFEST, b'{"round": 4}')
    assert _look(end, clock, 4 * BEAT_S)
    assert end.why == "the run's result is there"


def test_a_run_is_over_when_it_is_deleted(name: str, clock: Clock) -> None:
    store = MemoryStore(name)
    end = _end(store, clock)
    store.delete_many([info.key for info in store.list()])
    assert end()
    assert end.why == "the run was deleted"


def test_a_run_that_is_not_heard_of_is_given_up(name: str, clock: Clock) -> None:
    store = Timed(name)
    end = _end(store, clock)
    store.at(keys.alive(0), 50.0)
    assert not end()
    store.at(keys.alive(0), 60.0)
    assert not _look(end, clock, SILENCE_S - 1)
    assert not _look(end, clock, SILENCE_S - 1)
    assert _look(end, clock, 4 * BEAT_S)
    assert end.unheard


def test_a_run_is_looked_at_now_and_then(name: str, clock: Clock) -> None:
    store = Timed(name)
    end = _end(store, clock)
    for _ in range(15):
        end()
        clock.time += 1.0
    assert store.lists == 2
