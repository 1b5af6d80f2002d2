"""From what SageMaker says of a training job to a replica's status; nothing but rules.

==================  ========================================  ====================================
TrainingJobStatus   SecondaryStatus, FailureReason            status
==================  ========================================  ====================================
InProgress          Training, Uploading, Updating, new ones   running
InProgress          Interrupted, Restarting                   pending: preempted
InProgress          any other                                 pending
Stopping                                                      running
Completed                                                     succeeded
Stopped             MaxRuntimeExceeded                        failed: timeout
Stopped             MaxWaitTimeExceeded                       failed: no_capacity
Stopped             any other                                 cancelled
Failed              CapacityError…                            failed: no_capacity
Failed              InternalServerError…                      failed: lost
Failed              exit code 137, or more memory is needed   failed: out_of_memory
Failed              any other                                 failed: exit_code
Deleting                                                      failed: lost
any other                                                     unknown
==================  ========================================  ====================================
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from diloco_cloud.executor import Reason, ReplicaStatus

#: What a job that has not begun, or not begun again, is waiting for.
_WAITING: Final = {
    "Starting": "the job is starting",
    "Pending": "waiting for capacity",
    "LaunchingMLInstances": "instances are launched",
    "PreparingTrainingStack": "instances are prepared",
    "Downloading": "data are downloaded",
    "DownloadingTrainingImage": "the image is downloaded",
}
#: A container that ran, and will run again.
_INTERRUPTED: Final = {
    "Interrupted": "the spot instance was taken back; waiting for another",
    "Restarting": "SageMaker starts it again",
}
_EXIT_CODE: Final = re.compile(r"exit code:?\s*['\"]?(-?\d+)", re.IGNORECASE)
_KILLED: Final = 137


def needs_description(summary: Mapping[str, Any]) -> bool:
    """Whether a job's line in a listing does not tell its status; if not, its description does."""
    status = summary.get("TrainingJobStatus")
    return status in ("Failed", "Stopped") or (
        status == "InProgress" and not summary.get("SecondaryStatus")
    )


def status_of(job: Mapping[str, Any]) -> ReplicaStatus:
    """The status of a job.

    Args:
        job: DescribeTrainingJob's answer, or, where it is enough, a line of ListTrainingJobs.
    """
    state, detail = job.get("TrainingJobStatus"), str(job.get("SecondaryStatus") or "")
    if state == "InProgress":
        return _in_progress(detail)
    if state == "Stopping":
        return ReplicaStatus("running", message="SageMaker is stopping it")
    if state == "Completed":
        return ReplicaStatus("succeeded", exit_code=0)
    if state == "Stopped":
        return _stopped(detail)
    if state == "Failed":
        return _failed(" ".join(str(job.get("FailureReason") or "").split()))
    if state == "Deleting":
        return ReplicaStatus("failed", reason="lost", message="the training job is being deleted")
    return ReplicaStatus("unknown", message=f"SageMaker says {state!r}, whatever that is")


def _in_progress(detail: str) -> ReplicaStatus:
    if detail in _INTERRUPTED:
        return ReplicaStatus("pending", reason="preempted", message=_INTERRUPTED[detail])
    if detail in _WAITING:
        return ReplicaStatus("pending", message=_WAITING[detail])
    return ReplicaStatus("running")


def _stopped(detail: str) -> ReplicaStatus:
    if detail == "MaxRuntimeExceeded":
        return ReplicaStatus("failed", reason="timeout", message="it reached its time limit")
    if detail == "MaxWaitTimeExceeded":
        message = "there was no spot capacity for as long as it could wait"
        return ReplicaStatus("failed", reason="no_capacity", message=message)
    return ReplicaStatus("cancelled", reason="cancelled", message="the training job was stopped")


def _failed(why: str) -> ReplicaStatus:
    found = _EXIT_CODE.search(why)
    code = int(found[1]) if found else None
    return ReplicaStatus(
        "failed",
        exit_code=code,
        reason=_reason(why, code),
        message=why or "the training job failed, and SageMaker does not say why",
    )


def _reason(why: str, code: int | None) -> Reason:
    if why.startswith("CapacityError"):
        return "no_capacity"
    if why.startswith("InternalServerError"):
        return "lost"
    if code == _KILLED or "more memory" in why or "OutOfMemory" in why:
        return "out_of_memory"
    return "exit_code"
