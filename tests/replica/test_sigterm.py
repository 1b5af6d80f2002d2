"""SIGTERM, in real processes: the outcome is there at once, and the process ends."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from replica_process import SOON_S, STARTED_S, ReplicaProcess, eventually

from diloco_cloud import keys

Start = Callable[..., ReplicaProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[ReplicaProcess] = []

    def run(function: str, **settings: Any) -> ReplicaProcess:
        started.append(ReplicaProcess(tmp_path, function, **settings))
        return started[-1]

    yield run
    for replica in started:
        replica.close()


def summary(outcome: dict[str, Any]) -> tuple[str, int, str]:
    return outcome["state"], outcome["exit_code"], outcome["reason"]


def test_sigterm_is_a_preemption(start: Start) -> None:
    replica = start("long")
    replica.wait_for_file("training")
    replica.terminate()
    code, outcome = replica.end()
    assert (code, summary(outcome)) == (143, ("failed", 143, "preempted"))
    assert b'"failed"' in replica.store.get(keys.alive(0))
    logs = b"".join(replica.store.get(i.key) for i in replica.store.list(keys.LOGS))
    assert b"terminated (SIGTERM)" in logs


def test_sigterm_after_a_cancel_was_asked_for_is_a_cancellation(start: Start) -> None:
    replica = start("long")
    replica.wait_for_file("training")
    replica.store.put(keys.cancel(0, 0), b"{}")
    replica.terminate()
    code, outcome = replica.end()
    assert (code, summary(outcome)) == (143, ("cancelled", 143, "cancelled"))


def test_sigterm_ends_a_wait_for_a_peer(start: Start) -> None:
    replica = start("average", replicas=2)
    own = keys.put(0, 0, 0, 0)
    eventually(lambda: any(i.key == own for i in replica.store.list("rounds/")), STARTED_S)
    replica.terminate()
    code, outcome = replica.end()
    assert (code, summary(outcome)) == (143, ("failed", 143, "preempted"))


@pytest.mark.parametrize("stuck", ["state/", keys.ALIVE, keys.LOGS])
def test_stuck_upload_delays_neither_the_outcome_nor_the_end(start: Start, stuck: str) -> None:
    replica = start("long", trainer_args={"stuck": stuck})
    replica.wait_for_file("training")
    replica.wait_for_file("stuck")
    replica.terminate()
    eventually(lambda: replica.outcome() is not None, SOON_S / 4)
    assert replica.end()[0] == 143


def test_trainer_that_swallows_the_signal_is_terminated_all_the_same(start: Start) -> None:
    replica = start("stubborn")
    replica.wait_for_file("training")
    replica.terminate()
    code, outcome = replica.end()
    assert (code, summary(outcome)) == (143, ("failed", 143, "preempted"))


def test_second_sigterm_ends_the_process_at_once(start: Start) -> None:
    replica = start("lingering")
    replica.wait_for_file("training")
    replica.terminate()
    replica.wait_for_file("lingering")
    eventually(lambda: replica.outcome() is not None, SOON_S)
    replica.terminate()
    assert replica.process.wait(2.0) == 143


def test_trainer_that_lingers_is_ended_in_the_end(start: Start) -> None:
    replica = start("lingering")
    replica.wait_for_file("training")
    replica.terminate()
    assert replica.end()[0] == 143


def test_forked_worker_that_is_terminated_is_not_the_end_of_the_replica(start: Start) -> None:
    replica = start("forking")
    code = replica.process.wait(STARTED_S)
    outcome = replica.outcome()
    assert outcome is not None
    assert (code, outcome["state"], outcome["result"]) == (0, "succeeded", -15)


def test_reader_of_stdout_that_leaves_costs_nothing(start: Start) -> None:
    """As in ``… | head -1``: the lines still reach the prefix, and the exit code is the run's."""
    replica = start("chatter", stdout=subprocess.PIPE)
    assert replica.process.stdout is not None
    replica.process.stdout.readline()
    replica.process.stdout.close()
    code = replica.process.wait(STARTED_S)
    outcome = replica.outcome()
    assert outcome is not None
    assert (code, outcome["state"], outcome["result"]) == (0, "succeeded", "done")
    logs = b"".join(replica.store.get(i.key) for i in replica.store.list(keys.LOGS))
    assert logs.count(b'"line ') == 200
