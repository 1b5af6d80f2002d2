"""The reporter: what it writes, and what it survives."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator

import pytest
from replica_process import SOON_S, eventually

from diloco_cloud import keys
from diloco_cloud.outer.progress import Progress
from diloco_cloud.replica.heartbeat import Heartbeat
from diloco_cloud.replica.identity import Identity
from diloco_cloud.replica.outcome import Outcome
from diloco_cloud.replica.reporter import Reporter
from diloco_cloud.replica.shipper import LogShipper
from diloco_cloud.store.base import Data
from diloco_cloud.store.memory import MemoryStore

PREEMPTED = Outcome.ended_early("preempted", cancelled=False, handed_over=False)
CANCELLED = Outcome.ended_early("preempted", cancelled=True, handed_over=False)


class WatchedStore(MemoryStore):
    """Counts heartbeats, and holds the one that comes while ``held`` is set.

    So it does with whatever is written below ``stuck_prefix``.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.beats = threading.Semaphore(0)
        self.held = threading.Event()
        self.release = threading.Event()
        self.stuck = threading.Event()
        self.stuck_prefix = "no such key/"

    def put(self, key: str, data: Data) -> None:
        if key == keys.alive(0) and self.held.is_set():
            self.held.clear()
            self._hang()
        if key.startswith(self.stuck_prefix):
            self._hang()
        super().put(key, data)
        if key == keys.alive(0):
            self.beats.release()

    def _hang(self) -> None:
        self.stuck.set()
        assert self.release.wait(60)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[WatchedStore]:
    store = WatchedStore(request.node.name)
    yield store
    store.release.set()


def reporter_of(store: WatchedStore, heartbeat_s: float = 3600.0) -> Reporter:
    return Reporter(store, Identity(0, 0), LogShipper(store, 0, 0), heartbeat_s=heartbeat_s)


def test_heartbeats_follow_the_clock(store: WatchedStore) -> None:
    now = [0.0]
    heartbeat = Heartbeat(store, Identity(0, 0), period_s=0.05, now=lambda: now[0])
    heartbeat.start()
    assert store.beats.acquire(timeout=10)
    assert not store.beats.acquire(timeout=0.2)  # the thread looks at a clock that stands still
    now[0] = 0.05
    assert store.beats.acquire(timeout=10)
    heartbeat.close(join_s=10)


@pytest.mark.parametrize("stuck", ["logs/", "metrics/"])
def test_heartbeats_go_on_while_the_log_is_stuck(store: WatchedStore, stuck: str) -> None:
    store.stuck_prefix = stuck
    reporter = reporter_of(store, heartbeat_s=0.01)
    reporter._logs.handle(logging.LogRecord("x", logging.INFO, "", 0, "said", (), None))
    reporter._metrics.put(("metrics/x", {}))
    reporter.start()
    assert store.stuck.wait(10)
    for _ in range(10):
        assert store.beats.acquire(timeout=10)
    reporter.close(join_s=0.0)


def test_figure_that_json_cannot_hold_costs_neither_the_thread_nor_the_success(
    store: WatchedStore, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = reporter_of(store, heartbeat_s=0.01)
    progress = Progress()
    progress.loss = object()  # type: ignore[assignment]
    reporter.heartbeat.follow(progress)
    reporter.start()
    eventually(lambda: "heartbeat could not be written" in caplog.text, SOON_S)
    progress.loss = 0.5
    assert store.beats.acquire(timeout=10)
    progress.loss = object()  # type: ignore[assignment]
    reporter.end(Outcome.succeeded(None, None))
    assert json.loads(store.get(keys.outcome(0, 0)))["state"] == "succeeded"


def test_outcome_does_not_wait_for_a_stuck_heartbeat(store: WatchedStore) -> None:
    reporter = reporter_of(store)
    store.held.set()
    reporter.start()
    assert store.stuck.wait(10)
    reporter.end(PREEMPTED, join_s=0.0)
    assert not store.release.is_set()
    assert json.loads(store.get(keys.outcome(0, 0)))["reason"] == "preempted"
    assert json.loads(store.get(keys.alive(0)))["state"] == "failed"


def test_last_beat_tells_that_the_log_is_complete(store: WatchedStore) -> None:
    reporter = reporter_of(store)
    reporter.start()
    assert store.beats.acquire(timeout=10)
    assert json.loads(store.get(keys.alive(0)))["logged"] is False
    reporter._logs.handle(logging.LogRecord("x", logging.INFO, "", 0, "finished", (), None))
    reporter.end(Outcome.succeeded(None, None))
    assert b"finished" in store.get(keys.log_chunk(0, 0, 0))
    assert json.loads(store.get(keys.alive(0)))["logged"] is True


def test_last_beat_does_not_claim_a_log_that_is_stuck(store: WatchedStore) -> None:
    store.stuck_prefix = "logs/"
    reporter = reporter_of(store)
    reporter._logs.handle(logging.LogRecord("x", logging.INFO, "", 0, "said", (), None))
    reporter.start()
    assert store.stuck.wait(10)
    reporter.end(PREEMPTED, join_s=0.0)
    assert json.loads(store.get(keys.alive(0)))["logged"] is False


def test_end_of_a_life_that_nothing_hurries_outlasts_a_stuttering_store(
    store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty seconds for one request were seen where many replicas ended on two cores."""
    store.stuck_prefix = "logs/"
    reporter = reporter_of(store)
    reporter._logs.handle(logging.LogRecord("x", logging.INFO, "", 0, "finished", (), None))
    reporter.start()
    assert store.stuck.wait(10)
    patience, join = [], reporter._thread.join

    def join_later(timeout: float) -> None:
        patience.append(timeout)
        store.release.set()
        join(timeout)

    monkeypatch.setattr(reporter._thread, "join", join_later)
    reporter.end(Outcome.succeeded(None, None))
    assert patience[0] > 50
    assert b"finished" in store.get(keys.log_chunk(0, 0, 0))


def test_announcement_is_sent_at_once_and_stands_until_the_end(store: WatchedStore) -> None:
    reporter = reporter_of(store)
    reporter.heartbeat.follow(Progress())
    reporter.start()
    assert store.beats.acquire(timeout=10)
    reporter.heartbeat.announce("handing over")
    assert store.beats.acquire(timeout=10)
    assert json.loads(store.get(keys.alive(0)))["state"] == "handing over"
    reporter.record(PREEMPTED)
    reporter.heartbeat.announce("handing over")  # from a thread that was late
    assert store.beats.acquire(timeout=10)
    reporter.close()
    assert json.loads(store.get(keys.alive(0)))["state"] == "failed"


def test_first_record_stands(store: WatchedStore) -> None:
    reporter = reporter_of(store)
    reporter.record(CANCELLED)
    reporter.record(Outcome.succeeded(1, None))
    assert json.loads(store.get(keys.outcome(0, 0)))["state"] == "cancelled"
