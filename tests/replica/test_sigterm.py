"""SIGTERM, in real processes that have nothing to hand over, or do not come to it."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import pytest
from replica_process import SOON_S, STARTED_S, Start, eventually

from diloco_cloud import keys


def summary(outcome: dict[str, Any]) -> tuple[str, int, str]:
    return outcome["state"], outcome["exit_code"], outcome["reason"]


def test_sigterm_is_a_preemption(start: Start) -> None:
    replica = start("long")
    replica.wait_for_file("training")
    replica.terminate()
    code, outcome = replica.end()
    assert (code, summary(outcome)) == (143, ("failed", 143, "preempted"))
    assert b'"failed"' in replica.store.get(keys.alive(0))
    assert "terminated (SIGTERM)" in replica.logs()


def test_sigterm_after_a_cancel_was_asked_for_is_a_cancellation(start: Start) -> None:
    replica = start("long")
    replica.wait_for_file("training")
    replica.store.put(keys.cancel(0, 0), b"{}")
    replica.terminate()
    code, outcome = replica.end()
    assert (code, summary(outcome)) == (143, ("cancelled", 143, "cancelled"))


def test_sigterm_during_data_preparation_is_not_waited_for(start: Start) -> None:
    replica = start("preparing", module="trainers_that_end", grace_s=60.0)
    replica.wait_for_file("training")
    began = time.monotonic()
    replica.terminate()
    code, outcome = replica.end()
    assert time.monotonic() - began < SOON_S / 2
    assert (code, summary(outcome)) == (143, ("failed", 143, "preempted"))


def test_sigterm_interrupts_a_sleep_when_the_time_for_handing_over_has_passed(start: Start) -> None:
    replica = start("sleeping", module="trainers_that_end")
    replica.wait_for_file("training")
    replica.terminate()
    code, outcome = replica.end()
    assert (code, summary(outcome)) == (143, ("failed", 143, "preempted"))
    assert (replica.folder / "unwound").exists()


def test_sigterm_is_noted_in_a_call_that_no_signal_interrupts(start: Start) -> None:
    """Python runs no handler there, so that its process used to be killed without a word."""
    replica = start("computing", module="trainers_that_end")
    replica.wait_for_file("training")
    began = time.monotonic()
    replica.terminate()
    eventually(lambda: replica.beat()["state"] == "handing over", SOON_S / 4)
    eventually(lambda: replica.outcome() is not None, SOON_S / 4)
    assert replica.process.poll() is None
    code, outcome = replica.end()
    assert time.monotonic() - began < replica.grace_s
    assert (code, summary(outcome)) == (143, ("failed", 143, "preempted"))
    assert "terminated (SIGTERM)" in replica.logs()
    assert replica.beat()["state"] == "failed"


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
    assert (code, outcome["state"], outcome["result"]) == (0, "succeeded", [-15])


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
    assert replica.logs().count('"line ') == 200
