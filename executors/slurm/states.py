"""Slurm's words for a job's state, and what a replica left behind, as a replica's status.

Pure functions of what squeue prints and what the batch script wrote down.
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from diloco_cloud.executor import Reason, ReplicaStatus, State

#: Every state of slurm.h, and every flag that squeue shows in its place.
STATES: Final[dict[str, tuple[State, Reason | None]]] = {
    "PENDING": ("pending", None),
    "CONFIGURING": ("pending", None),
    "POWER_UP_NODE": ("pending", None),
    "REQUEUED": ("pending", None),
    "REQUEUE_FED": ("pending", None),
    "REQUEUE_HOLD": ("pending", None),
    "RESV_DEL_HOLD": ("pending", None),
    "SPECIAL_EXIT": ("pending", None),
    "RUNNING": ("running", None),
    "COMPLETING": ("running", None),
    "RESIZING": ("running", None),
    "SIGNALING": ("running", None),
    "STAGE_OUT": ("running", None),
    "STOPPED": ("running", None),
    "SUSPENDED": ("running", None),
    "UPDATE_DB": ("running", None),
    "COMPLETED": ("succeeded", None),
    "CANCELLED": ("cancelled", "cancelled"),
    "FAILED": ("failed", "exit_code"),
    "TIMEOUT": ("failed", "timeout"),
    "DEADLINE": ("failed", "timeout"),
    "OUT_OF_MEMORY": ("failed", "out_of_memory"),
    "PREEMPTED": ("failed", "preempted"),
    "NODE_FAIL": ("failed", "lost"),
    "BOOT_FAIL": ("failed", "lost"),
    "LAUNCH_FAILED": ("failed", "lost"),
    "RECONFIG_FAIL": ("failed", "lost"),
    # Another cluster of the federation has it, and this one will not say how it fares.
    "REVOKED": ("unknown", None),
}
_MESSAGES: Final[dict[Reason, str]] = {
    "timeout": "ran past its timeout and was stopped",
    "out_of_memory": "ran out of memory",
    "preempted": "was preempted",
    "lost": "its node failed",
}
#: squeue's reasons for waiting that say nothing.
_NO_REASON: Final = frozenset({"", "None", "(null)"})
#: As the last line of a traceback; torch's class is known by its name.
_OUT_OF_MEMORY: Final = re.compile(r"(?:\w+\.)*(?:MemoryError|OutOfMemoryError)\b")

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One task of a job array, as squeue shows it.

    Attributes:
        name: of the job.
        comment: that its submission gave.
        state: in Slurm's words.
        reason: why it waits, or how it ended.
        wait_status: as of waitpid; 0 while it runs.
        restarts: how often Slurm has requeued it.
        node: where it runs or ran; "" if nowhere yet.
    """

    name: str
    comment: str
    state: str
    reason: str
    wait_status: int
    restarts: int
    node: str

    @property
    def has_ended(self) -> bool:
        return STATES.get(self.state, ("unknown", None))[0] in ("succeeded", "failed", "cancelled")


@dataclass(frozen=True)
class Evidence:
    """What a replica's directory tells of its end.

    Attributes:
        exit_code: of its process; negative for a signal; None if its script was killed, too.
        stopped: "timeout" or "terminated" where the script saw it stopped.
        cancelled: somebody asked for its end.
        tail: its log's last lines.
    """

    exit_code: int | None = None
    stopped: str = ""
    cancelled: bool = False
    tail: str = ""

    @property
    def last_line(self) -> str:
        return next((line.strip() for line in self.tail.split("\n")[::-1] if line.strip()), "")


def parse_evidence(text: str) -> Evidence:
    """Read what :data:`REPORT` prints: the record, "cancel" or nothing, and the log's end."""
    record, _, rest = text.partition("\n")
    cancel, _, tail = rest.partition("\n")
    values = _json(record)
    code = values.get("exit_code")
    return Evidence(
        exit_code=_signed(code) if isinstance(code, int) else None,
        stopped=str(values.get("stopped", "")),
        cancelled=cancel == "cancel",
        tail=tail,
    )


#: Prints a directory's evidence; the directory is its first argument.
REPORT: Final = (
    'cd "$1" 2>/dev/null || { echo; echo; exit 0; }; '
    "head -n 1 exit 2>/dev/null || echo; "
    "if [ -e cancel ]; then echo cancel; else echo; fi; "
    "tail -n 20 log.txt 2>/dev/null || true"
)


def going(job: Job) -> ReplicaStatus:
    """The status of a job that has not ended."""
    state = STATES.get(job.state)
    if state is None:
        return ReplicaStatus("unknown", message=f"Slurm calls its state {job.state}")
    message = "" if job.reason in _NO_REASON or state[0] != "pending" else f"waits: {job.reason}"
    return ReplicaStatus(state[0], message=message)


def ended(job: Job, evidence: Evidence) -> ReplicaStatus:
    """The status of a job that has ended, and that Slurm still knows."""
    state, reason = STATES[job.state]
    code = evidence.exit_code if evidence.exit_code is not None else _exit_code(job)
    if state == "succeeded":
        return ReplicaStatus("succeeded", exit_code=0)
    if state == "cancelled":
        return ReplicaStatus("cancelled", exit_code=code, reason="cancelled")
    if evidence.stopped == "timeout":
        reason = "timeout"
    return _failed(reason or "exit_code", code, evidence)


def forgotten(evidence: Evidence) -> ReplicaStatus:
    """The status of a job that Slurm does not know any more."""
    if evidence.exit_code is None:
        if evidence.cancelled:
            return ReplicaStatus("cancelled", reason="cancelled")
        message = "Slurm does not know it any more, and it left no record of its end"
        return ReplicaStatus("failed", reason="lost", message=message)
    if evidence.stopped == "terminated":
        if evidence.cancelled:
            return ReplicaStatus("cancelled", exit_code=evidence.exit_code, reason="cancelled")
        return _failed("preempted", evidence.exit_code, evidence)
    if evidence.stopped == "timeout":
        return _failed("timeout", evidence.exit_code, evidence)
    if evidence.exit_code == 0:
        return ReplicaStatus("succeeded", exit_code=0)
    return _failed("exit_code", evidence.exit_code, evidence)


def _failed(reason: Reason, code: int | None, evidence: Evidence) -> ReplicaStatus:
    if reason == "exit_code" and _OUT_OF_MEMORY.match(evidence.last_line):
        reason = "out_of_memory"
    message = _MESSAGES.get(reason) or evidence.last_line or _describe(code)
    if reason == "exit_code" and code is not None and code < 0:
        message = _describe(code)
    if reason == "out_of_memory" and evidence.last_line:
        message = evidence.last_line
    return ReplicaStatus("failed", exit_code=code, reason=reason, message=message)


def _describe(code: int | None) -> str:
    if code is None:
        return "failed"
    if code >= 0:
        return f"exited with code {code}"
    hint = " (perhaps out of memory)" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"


def _exit_code(job: Job) -> int | None:
    """The exit code by squeue; None for a job that never ran."""
    if not job.node:
        return None
    if job.wait_status & 127:
        return -(job.wait_status & 127)
    return _signed(job.wait_status >> 8)


def _signed(code: int) -> int:
    """A shell's exit code of a process that a signal killed, as Python writes it."""
    is_signal = code > 128 and code - 128 in signal.valid_signals()
    return 128 - code if is_signal else code


def _json(text: str) -> Json:
    try:
        values = json.loads(text)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}
