"""From what the hub says of a job to a replica's state."""

from __future__ import annotations

import re
from typing import Any, Final

from diloco_cloud.executor import Reason, ReplicaStatus

#: The hub has no field for an exit code or for the cause of an end; its message is for people.
_EXIT_CODE: Final = re.compile(r"exit code:?\s*(-?\d+)", re.IGNORECASE)
_CAUSES: Final[tuple[tuple[re.Pattern[str], Reason], ...]] = (
    (re.compile(r"\btime(d)?[ -]?out\b", re.IGNORECASE), "timeout"),
    (re.compile(r"\bOOM|out of memory", re.IGNORECASE), "out_of_memory"),
    (re.compile(r"\bevict|\bpreempt|node (was )?(lost|shut)", re.IGNORECASE), "preempted"),
    (
        re.compile(r"capacity|credits?\b|quota|subscription|resource.group", re.IGNORECASE),
        "no_capacity",
    ),
)
#: Cancelled by the hub itself, as it says: the account's money or its group's limit has run out.
_HUBS_OWN: Final = re.compile(r"credits?\b|subscription|resource.group", re.IGNORECASE)


def status_of(job: Any, *, timeout_s: float | None = None) -> ReplicaStatus:
    """The state of a job.

    Args:
        job: a ``JobInfo`` of huggingface_hub.
        timeout_s: what the job was given, if known; tells an end by time where no message does.
    """
    stage, message = str(getattr(job.status.stage, "value", job.status.stage)), job.status.message
    text = " ".join(message.split())[:300] if message else ""
    match stage:
        case "SCHEDULING":
            return ReplicaStatus("pending", message=text)
        case "RUNNING":
            return ReplicaStatus("running", message=text)
        case "COMPLETED":
            return ReplicaStatus("succeeded", exit_code=0)
        case "CANCELED" if not _HUBS_OWN.search(text):
            return ReplicaStatus("cancelled", reason="cancelled", message=text)
        case "CANCELED":
            return ReplicaStatus("failed", reason="no_capacity", message=text)
        case "ERROR":
            return _failed(text, _outran(job, timeout_s))
        case "DELETED":
            return ReplicaStatus("failed", reason="lost", message=text or "the job was deleted")
    return ReplicaStatus("unknown", message=f"the hub says {stage}: {text}")


def _failed(message: str, outran: bool) -> ReplicaStatus:
    found = _EXIT_CODE.search(message)
    code = int(found[1]) if found else None
    reason: Reason = next((why for words, why in _CAUSES if words.search(message)), "exit_code")
    if reason == "exit_code" and code is None and outran:
        reason = "timeout"
    shown = message or ("ran past its timeout" if outran else "the job failed")
    return ReplicaStatus("failed", exit_code=code, reason=reason, message=shown)


def _outran(job: Any, timeout_s: float | None) -> bool:
    ran = getattr(job.durations, "running_secs", None) if job.durations is not None else None
    return timeout_s is not None and ran is not None and ran >= timeout_s
