"""The reporter: what it writes, and what it survives."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
from replica_process import SOON_S, eventually

from diloco_cloud import keys
from diloco_cloud.outer.progress import Progress
from diloco_cloud.replica.identity import Identity
from diloco_cloud.replica.outcome import Outcome
from diloco_cloud.replica.reporter import Reporter
from diloco_cloud.replica.shipper import LogShipper
from diloco_cloud.store.base import Data
from diloco_cloud.store.memory import MemoryStore


class WatchedStore(MemoryStore):
    """Counts heartbeats, and holds those that come while ``held`` is set."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.beats = threading.Semaphore(0)
        self.held = threading.Event()
        self.release = threading.Event()
        self.stuck = threading.Event()

    def put(self, key: str, data: Data) -> None:
        if key == keys.alive(0) and self.held.is_set():
            self.held.clear()
            self.stuck.set()
            assert self.release.wait(60)
        super().put(key, data)
        if key == keys.alive(0):
            self.beats.release()


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[WatchedStore]:
    store = WatchedStore(request.node.name)
    yield store
    store.release.set()


def reporter_of(store: WatchedStore, now: list[float]) -> tuple[Reporter, LogShipper]:
    shipper = LogShipper(store, 0, 0)
    return Reporter(store, Identity(0, 0), shipper, heartbeat_s=5.0, now=lambda: now[0]), shipper


def test_heartbeats_follow_the_clock_and_not_how_often_it_is_woken(store: WatchedStore) -> None:
    now = [0.0]
    reporter, shipper = reporter_of(store, now)
    reporter.start()
    assert store.beats.acquire(timeout=10)
    for _ in range(5):  # each wakes the thread, which used to be taken for 2 s gone by
        shipper.full.set()
        eventually(lambda: not shipper.full.is_set(), SOON_S)
    assert not store.beats.acquire(timeout=0.2)
    now[0] = 5.0
    shipper.full.set()
    assert store.beats.acquire(timeout=10)
    reporter.close()


def test_figure_that_json_cannot_hold_costs_neither_the_thread_nor_the_success(
    store: WatchedStore, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    reporter, shipper = reporter_of(store, now)
    progress = Progress()
    progress.loss = object()  # type: ignore[assignment]
    reporter.follow(progress)
    reporter.start()
    eventually(lambda: "heartbeat could not be written" in caplog.text, SOON_S)
    progress.loss, now[0] = 0.5, 5.0
    shipper.full.set()
    assert store.beats.acquire(timeout=10)
    progress.loss = object()  # type: ignore[assignment]
    reporter.end(Outcome.succeeded(None, None))
    assert json.loads(store.get(keys.outcome(0, 0)))["state"] == "succeeded"


def test_outcome_does_not_wait_for_a_stuck_heartbeat(store: WatchedStore) -> None:
    reporter, _ = reporter_of(store, [0.0])
    store.held.set()
    reporter.start()
    assert store.stuck.wait(10)
    reporter.end(Outcome.terminated(cancelled=False), join_s=0.0)
    assert not store.release.is_set()
    assert json.loads(store.get(keys.outcome(0, 0)))["reason"] == "preempted"
    assert json.loads(store.get(keys.alive(0)))["state"] == "failed"


def test_first_record_stands(store: WatchedStore) -> None:
    reporter, _ = reporter_of(store, [0.0])
    reporter.record(Outcome.terminated(cancelled=True))
    reporter.record(Outcome.succeeded(1, None))
    assert json.loads(store.get(keys.outcome(0, 0)))["state"] == "cancelled"
