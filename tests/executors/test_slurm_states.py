"""Slurm's states, its list of jobs, and a replica's own record, as statuses."""

from __future__ import annotations

from typing import get_args

import pytest

from diloco_cloud.executor import Reason, State
from diloco_cloud.executors.slurm.commands import CommandError, Output
from diloco_cloud.executors.slurm.queue import Queue
from diloco_cloud.executors.slurm.states import (
    STATES,
    Evidence,
    Job,
    ended,
    forgotten,
    going,
    parse_evidence,
)

#: Of slurm/slurm.h: job_states, and the flags that job_state_string shows in their place.
SLURM_STATES = [
    *("PENDING", "RUNNING", "SUSPENDED", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT"),
    *("NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "LAUNCH_FAILED"),
    *("COMPLETING", "CONFIGURING", "POWER_UP_NODE", "RECONFIG_FAIL", "REQUEUED", "REQUEUE_FED"),
    *("REQUEUE_HOLD", "RESIZING", "RESV_DEL_HOLD", "REVOKED", "SIGNALING", "SPECIAL_EXIT"),
    *("STAGE_OUT", "STOPPED", "UPDATE_DB"),
]
#: What squeue 22.05.8 printed of an array of three and of another job, blanks shortened.
LISTING = """\
  1|  0|   PENDING|    0|   1|  (null)| x.a0|  cafe0123|  BeginTime|
  1|  2| CANCELLED|    9|   0|      vm| x.a0|  cafe0123|       None|
  1|  5|    FAILED| 1792|   0|      vm| x.a0|  cafe0123| NonZeroExitCode|
  5|N/A|    FAILED|    1|   0|  (null)| job.sh|  (null)| BadConstraints|
"""


def _job(state: str, wait_status: int = 0, reason: str = "None", node: str = "vm") -> Job:
    return Job("run-1.a0", "cafe0123", state, reason, wait_status, 0, node)


@pytest.mark.parametrize("name", SLURM_STATES)
def test_state_every_state_of_slurm_is_known(name: str) -> None:
    state, reason = STATES[name]
    assert state in get_args(State)
    assert reason is None or reason in get_args(Reason)
    status = ended(_job(name), Evidence()) if _job(name).has_ended else going(_job(name))
    assert status == state
    assert status.reason == reason


def test_state_of_a_later_slurm_is_unknown_not_failed() -> None:
    status = going(_job("EXPEDITING"))
    assert status == "unknown"
    assert "EXPEDITING" in status.message


def test_waiting_job_says_what_it_waits_for() -> None:
    assert going(_job("PENDING", reason="PartitionTimeLimit")).message == (
        "waits: PartitionTimeLimit"
    )
    assert going(_job("PENDING")).message == ""


@pytest.mark.parametrize(
    ("wait_status", "code"), [(1792, 7), (9, -9), (139 << 8, -11), (1 << 8, 1), (200 << 8, 200)]
)
def test_exit_code_comes_from_slurm_where_the_script_was_killed(
    wait_status: int, code: int
) -> None:
    assert ended(_job("FAILED", wait_status), Evidence()).exit_code == code


def test_job_that_never_ran_has_no_exit_code() -> None:
    assert ended(_job("FAILED", 256, node=""), Evidence()).exit_code is None


def test_timeout_that_the_script_has_kept_is_a_timeout() -> None:
    evidence = Evidence(exit_code=-15, stopped="timeout")
    for status in (ended(_job("FAILED", 143 << 8), evidence), forgotten(evidence)):
        assert (status, status.reason, status.exit_code) == ("failed", "timeout", -15)


@pytest.mark.parametrize(
    ("evidence", "state", "reason", "code"),
    [
        (Evidence(0), "succeeded", None, 0),
        (Evidence(3), "failed", "exit_code", 3),
        (Evidence(-9), "failed", "exit_code", -9),
        (Evidence(-15, stopped="terminated"), "failed", "preempted", -15),
        (Evidence(-15, stopped="terminated", cancelled=True), "cancelled", "cancelled", -15),
        (Evidence(0, cancelled=True), "succeeded", None, 0),
        (Evidence(cancelled=True), "cancelled", "cancelled", None),
        (Evidence(), "failed", "lost", None),
    ],
)
def test_forgotten_job_is_told_by_its_own_record(
    evidence: Evidence, state: str, reason: str | None, code: int | None
) -> None:
    status = forgotten(evidence)
    assert (status, status.reason, status.exit_code) == (state, reason, code)


def test_failure_is_described_by_the_logs_last_line() -> None:
    status = forgotten(Evidence(1, tail="Traceback\n  ...\nValueError: boom\n\n"))
    assert status.message == "ValueError: boom"
    status = forgotten(Evidence(1, tail="torch.OutOfMemoryError: CUDA out of memory.\n"))
    assert (status.reason, status.message[:22]) == ("out_of_memory", "torch.OutOfMemoryError")


@pytest.mark.parametrize(
    ("text", "evidence"),
    [
        ('{"exit_code": 137, "stopped": ""}\n\nlog\n', Evidence(-9, "", False, "log\n")),
        ('{"exit_code": 0, "stopped": "terminated"}\ncancel\n', Evidence(0, "terminated", True)),
        ("\n\n", Evidence()),
        ("", Evidence()),
        ('{"exit_code": \ncancel\nx', Evidence(None, "", True, "x")),
    ],
)
def test_evidence_is_read_back(text: str, evidence: Evidence) -> None:
    assert parse_evidence(text) == evidence


class _Squeue:
    """Answers by a list; counts."""

    def __init__(self, *answers: Output | CommandError) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, argv: object, stdin: str) -> Output:
        assert isinstance(argv, list)
        self.asked.append(argv[-1])
        answer = self.answers.pop(0)
        if isinstance(answer, CommandError):
            raise answer
        return answer


def test_queue_asks_once_for_all_who_look_at_the_same_time() -> None:
    now = [0.0]
    squeue = _Squeue(Output(0, LISTING), Output(0, LISTING))
    queue = Queue(squeue, clock=lambda: now[0])
    assert [getattr(queue.look("1", task), "state", None) for task in (0, 2, 5, 7)] == [
        "PENDING",
        "CANCELLED",
        "FAILED",
        None,
    ]
    assert squeue.asked == ["--jobs=1"]
    now[0] = 1.5
    assert queue.look("1", 5) == Job("x.a0", "cafe0123", "FAILED", "NonZeroExitCode", 1792, 0, "vm")
    assert len(squeue.asked) == 2


def test_queue_tells_a_failure_from_a_job_that_is_not_known() -> None:
    unknown = Output(1, "", "slurm_load_jobs error: Invalid job id specified\n")
    down = Output(1, "", "slurm_load_jobs error: Unable to contact slurm controller\n")
    now = [0.0]
    queue = Queue(_Squeue(unknown, down, CommandError("no answer")), clock=lambda: now[0])
    assert queue.look("1", 0) is None
    for words in ("Unable to contact slurm controller", "no answer"):
        now[0] += 2
        with pytest.raises(CommandError, match=words):
            queue.look("1", 0)
