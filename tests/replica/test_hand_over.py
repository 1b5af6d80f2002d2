"""Real processes that are to end, and hand over what they have done."""

from __future__ import annotations

import json
from typing import Any

import pytest
from replica_process import SOON_S, STARTED_S, ReplicaProcess, Start, eventually

from diloco_cloud import keys
from diloco_cloud.exchange.payloads import read_header

HERE = "trainers_that_end"
#: Long enough that a replica which waited for it would be noticed.
LONG_S = 120.0


def summary(outcome: dict[str, Any]) -> tuple[str, int, str, bool]:
    return outcome["state"], outcome["exit_code"], outcome["reason"], outcome["restartable"]


def contributed_steps(replica: ReplicaProcess) -> int:
    """Inner steps in what the replica has put into the first round."""
    header, _ = read_header(replica.store, keys.put(0, 0, 0, 0), 0)
    return header.inner_steps


def _place(replica: ReplicaProcess) -> tuple[int, int | None]:
    beat = replica.beat()
    return beat["attempt"], beat.get("round")


def test_sigterm_hands_over_what_was_done(start: Start) -> None:
    replica = start("steps", module=HERE, grace_s=LONG_S)
    replica.wait_for_file("training")
    replica.terminate()
    code, outcome = replica.end()
    assert (code, summary(outcome)) == (143, ("failed", 143, "preempted", True))
    assert contributed_steps(replica) >= 3
    assert not replica.store.list(keys.commit(0, 0))
    assert "handed over (SIGTERM)" in replica.logs()
    assert replica.beat()["state"] == "failed"


def test_cancel_hands_over_too(start: Start) -> None:
    replica = start("steps", module=HERE, grace_s=LONG_S)
    replica.wait_for_file("training")
    replica.store.put(keys.cancel(0, 0), b"{}")
    replica.terminate()
    code, outcome = replica.end()
    assert (code, summary(outcome)) == (143, ("cancelled", 143, "cancelled", False))
    assert contributed_steps(replica) >= 3


def test_time_limit_hands_over_by_itself(start: Start) -> None:
    replica = start("steps", module=HERE, grace_s=LONG_S, settings={"timeout": 40})
    code = replica.process.wait(STARTED_S)
    outcome = replica.outcome()
    assert outcome is not None
    assert (code, summary(outcome)) == (143, ("failed", 143, "timeout", True))
    assert contributed_steps(replica) >= 1
    assert "handed over (time limit)" in replica.logs()


def test_trainer_may_ask_for_it_itself(start: Start) -> None:
    replica = start("wishing", module=HERE)
    code = replica.process.wait(STARTED_S)
    outcome = replica.outcome()
    assert outcome is not None
    assert (code, summary(outcome)) == (143, ("failed", 143, "preempted", True))
    assert contributed_steps(replica) >= 1


def test_hand_over_that_a_trainer_swallows_does_not_leave_the_run(start: Start) -> None:
    replica = start("steps", module=HERE, grace_s=LONG_S, trainer_args={"swallow": True})
    replica.wait_for_file("training")
    replica.terminate()
    code, outcome = replica.end()
    assert (code, summary(outcome)) == (143, ("failed", 143, "preempted", True))
    assert contributed_steps(replica) >= 3
    assert not [info for info in replica.store.list(keys.ROUNDS) if "/leave/" in info.key]


def test_next_life_goes_on_after_what_was_handed_over(start: Start) -> None:
    replica = start("steps", module=HERE, grace_s=LONG_S)
    replica.wait_for_file("training")
    replica.terminate()
    replica.end()
    steps = contributed_steps(replica)
    replica.restart()
    eventually(lambda: _place(replica) == (1, 1), STARTED_S)
    assert replica.beat()["inner_step"] >= steps
    commit = json.loads(replica.store.get(keys.commit(0, 0)))
    assert [(one["rank"], one["attempt"]) for one in commit["contributors"]] == [(0, 0)]


def test_training_that_is_complete_in_time_has_succeeded(start: Start) -> None:
    replica = start("finishing", module=HERE, grace_s=LONG_S)
    replica.wait_for_file("training")
    replica.terminate()
    code, outcome = replica.end()
    assert (code, outcome["state"], outcome["result"]) == (0, "succeeded", "complete")
    assert outcome["restartable"] is False


def test_error_that_the_end_brings_about_is_no_failure(start: Start) -> None:
    replica = start("breaking", module=HERE, grace_s=LONG_S)
    replica.wait_for_file("training")
    replica.terminate()
    code, outcome = replica.end()
    assert (code, summary(outcome)) == (143, ("failed", 143, "preempted", True))
    assert "a data loader's worker was terminated" in replica.logs()


def test_training_in_another_thread_hands_over(start: Start) -> None:
    replica = start("elsewhere", module=HERE, grace_s=8.0)
    replica.wait_for_file("training")
    replica.terminate()
    replica.wait_for_file("joined")
    code, outcome = replica.end()
    assert (code, summary(outcome)) == (143, ("failed", 143, "preempted", True))
    assert contributed_steps(replica) >= 3


@pytest.mark.parametrize("function", ["steps", "computing"])
def test_second_sigterm_ends_a_hand_over_at_once(start: Start, function: str) -> None:
    replica = start(function, module=HERE, grace_s=LONG_S)
    replica.wait_for_file("training")
    replica.terminate()
    if function == "computing":  # nothing will come of it
        eventually(lambda: replica.beat()["state"] == "handing over", SOON_S)
    replica.terminate()
    assert replica.process.wait(SOON_S) == 143  # far less than its grace
