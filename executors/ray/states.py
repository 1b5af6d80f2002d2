"""Ray's words for a job's state as a replica's status: pure functions of what the API answers."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import Any, Final

from diloco_cloud.executor import Reason, ReplicaStatus, State

#: Variables whose values Ray would change, as JSON: it puts others' values in the place of ``$X``.
LITERALS: Final = "DILOCO_RAY_LITERALS"
#: Exit code of a replica that was stopped at its timeout, as of timeout(1), if this line is the
#: last of its log.
TIMED_OUT: Final = 124
TIMED_OUT_LINE: Final = "diloco-cloud: the replica ran past its timeout and was stopped"
#: Every ``JobStatus``.
STATES: Final[dict[str, State]] = {
    "PENDING": "pending",
    "RUNNING": "running",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "STOPPED": "cancelled",
}
#: Every ``JobErrorType``; older clusters send none.
REASONS: Final[dict[str, Reason]] = {
    "RUNTIME_ENV_SETUP_FAILURE": "exit_code",
    "JOB_SUPERVISOR_ACTOR_START_TIMEOUT": "no_capacity",
    "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE": "no_capacity",
    "JOB_SUPERVISOR_ACTOR_START_FAILURE": "lost",
    "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE": "lost",
    "JOB_SUPERVISOR_ACTOR_DIED": "lost",
    "JOB_ENTRYPOINT_COMMAND_START_ERROR": "exit_code",
    "JOB_ENTRYPOINT_COMMAND_ERROR": "exit_code",
}
#: Ray's words where its memory monitor killed a process, and for a node that goes away.
_OUT_OF_MEMORY: Final = re.compile(r"running low on memory|OutOfMemoryError|^MemoryError\b", re.M)
_PREEMPTED: Final = re.compile(r"preempted", re.I)
#: Before the log's last lines, which Ray adds to the message.
_LOG_FOLLOWS: Final = "last available logs (truncated to 20,000 chars):\n"


def status_of(job: Mapping[str, Any]) -> ReplicaStatus:
    """A replica's status.

    Args:
        job: as the API tells of it.
    """
    said = str(job.get("status"))
    state = STATES.get(said)
    if state is None:
        return ReplicaStatus("unknown", message=f"Ray calls its state {said}")
    message = str(job.get("message") or "")
    if state == "succeeded":
        return ReplicaStatus("succeeded", exit_code=0)
    if state == "cancelled":
        return ReplicaStatus("cancelled", reason="cancelled", exit_code=_exit_code(job))
    if state == "failed":
        return _failed(job, message)
    waits = state == "pending" and message not in ("", "Job has not started yet.")
    return ReplicaStatus(state, message=message if waits else "")


def _failed(job: Mapping[str, Any], message: str) -> ReplicaStatus:
    kind = str(job.get("error_type") or "JOB_ENTRYPOINT_COMMAND_ERROR")
    reason = REASONS.get(kind, "lost")
    code = _exit_code(job)
    tail = message.partition(_LOG_FOLLOWS)[2]
    last = next((line.strip() for line in tail.split("\n")[::-1] if line.strip()), "")
    if code == TIMED_OUT and last == TIMED_OUT_LINE:
        return ReplicaStatus(
            "failed",
            exit_code=code,
            reason="timeout",
            message="ran past its timeout and was stopped",
        )
    if _OUT_OF_MEMORY.search(last or message):
        reason = "out_of_memory"
    elif reason == "lost" and _PREEMPTED.search(message):
        reason = "preempted"
    return ReplicaStatus(
        "failed", exit_code=code, reason=reason, message=_one_line(code, last, message)
    )


def _one_line(code: int | None, last: str, message: str) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return last or (lines[0] if lines else f"exited with code {code}")


def _exit_code(job: Mapping[str, Any]) -> int | None:
    """The replica's exit code; negative for a signal, as Python writes it."""
    code = job.get("driver_exit_code")
    if not isinstance(code, int):
        return None
    return 128 - code if code > 128 and code - 128 in signal.valid_signals() else code
