"""Every status of a training job is some state of a replica."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from fakes.aws_validation import operation

from diloco_cloud.executor import Reason, State
from diloco_cloud.executors.sagemaker.states import needs_description, status_of

_SHAPES = operation("sagemaker", "DescribeTrainingJob").output_shape.members
STATUSES: list[str] = _SHAPES["TrainingJobStatus"].enum
SECONDARIES: list[str] = [*_SHAPES["SecondaryStatus"].enum, "SomethingNew", ""]

#: FailureReasons that people have met, and what they come to.
FAILURES: dict[str, tuple[int | None, str]] = {
    "AlgorithmError: , exit code: 1": (1, "exit_code"),
    "AlgorithmError: Exit Code: 139": (139, "exit_code"),
    "AlgorithmError: ExecuteUserScriptError:\nExitCode 1\nErrorMessage ValueError, exit code: 1": (
        1,
        "exit_code",
    ),
    "AlgorithmError: , exit code: 137": (137, "out_of_memory"),
    "ClientError: Please use an instance type with more memory, or reduce the size of training "
    "data processed on an instance.": (None, "out_of_memory"),
    "AlgorithmError: torch.OutOfMemoryError: CUDA out of memory., exit code: 1": (
        1,
        "out_of_memory",
    ),
    "CapacityError: Unable to provision requested ML compute capacity. Please retry using a "
    "different ML instance type.": (None, "no_capacity"),
    "InternalServerError: We encountered an internal error. Please try again.": (None, "lost"),
    "ClientError: Cannot pull the image": (None, "exit_code"),
    "": (None, "exit_code"),
}


@pytest.mark.parametrize("secondary", SECONDARIES)
@pytest.mark.parametrize("status", [*STATUSES, "SomethingElse"])
def test_mapping_is_total(status: str, secondary: str) -> None:
    found = status_of({"TrainingJobStatus": status, "SecondaryStatus": secondary})
    assert str(found) in typing.get_args(State)
    assert found.reason is None or found.reason in typing.get_args(Reason)
    assert found.is_terminal == (status in ("Completed", "Failed", "Stopped", "Deleting"))
    assert found.is_terminal or found.exit_code is None
    assert found != "failed" or found.message


def _status(status: str, secondary: str, **more: Any) -> tuple[str, str | None]:
    job = {"TrainingJobStatus": status, "SecondaryStatus": secondary, **more}
    found = status_of(job)
    return str(found), found.reason


def test_known_statuses() -> None:
    assert _status("InProgress", "Starting") == ("pending", None)
    assert _status("InProgress", "Pending") == ("pending", None)
    assert _status("InProgress", "Downloading") == ("pending", None)
    assert _status("InProgress", "Training") == ("running", None)
    assert _status("InProgress", "Uploading") == ("running", None)
    assert _status("InProgress", "Interrupted") == ("pending", "preempted")
    assert _status("Stopping", "Stopping") == ("running", None)
    assert _status("Stopped", "Stopped") == ("cancelled", "cancelled")
    assert _status("Stopped", "MaxRuntimeExceeded") == ("failed", "timeout")
    assert _status("Stopped", "MaxWaitTimeExceeded") == ("failed", "no_capacity")
    assert status_of({"TrainingJobStatus": "Completed"}).exit_code == 0


@pytest.mark.parametrize("why", FAILURES)
def test_failure_is_told_by_its_reason(why: str) -> None:
    found = status_of({"TrainingJobStatus": "Failed", "FailureReason": why})
    assert (found.exit_code, found.reason) == FAILURES[why]
    assert "\n" not in found.message


def test_listing_says_enough_while_a_job_goes_on() -> None:
    going = {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Training"}
    assert not needs_description(going)
    assert not needs_description({"TrainingJobStatus": "Completed"})
    assert needs_description({"TrainingJobStatus": "InProgress"})
    assert needs_description({"TrainingJobStatus": "Failed", "SecondaryStatus": "Failed"})
    assert needs_description({"TrainingJobStatus": "Stopped", "SecondaryStatus": "Stopped"})
