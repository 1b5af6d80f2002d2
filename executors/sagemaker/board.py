"""What SageMaker says of training jobs, asked for once for all the jobs of a launch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from diloco_cloud.executor import ReplicaStatus
from diloco_cloud.executors.sagemaker.clients import Clients
from diloco_cloud.executors.sagemaker.faults import is_denied
from diloco_cloud.executors.sagemaker.jobs import Job, is_of_launch
from diloco_cloud.executors.sagemaker.states import needs_description, status_of

_PAGE: Final = 100

#: Said of a launch, of a region and of an account, in which there is nothing.
NOTHING_THERE: Final = (
    "SageMaker knows no training job of %s in %s, the region that is set here, of %s. If it was "
    "launched elsewhere: set AWS_REGION to that region, AWS_PROFILE (or the credentials) to that "
    "account's, and try again."
)


class _Answer:
    """The newest listing of one launch's jobs, or the error it ended with."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.at: float | None = None
        self.jobs: Mapping[str, Mapping[str, Any]] = {}
        self.error: Exception | None = None


class JobBoard:
    """Statuses of jobs, with few requests; may be used from several threads.

    Args:
        clients: of AWS.
        clock: seconds from any origin.
        refresh_s: seconds for which an answer is as good as a new one.
    """

    def __init__(
        self, clients: Clients, clock: Callable[[], float], refresh_s: float = 1.0
    ) -> None:
        self._refresh_s = refresh_s
        self._clients = clients
        self._clock = clock
        self._lock = threading.Lock()
        self._answers: dict[tuple[str, str], _Answer] = {}
        self._ended: dict[tuple[str, str], ReplicaStatus] = {}

    def status(self, job: Job) -> ReplicaStatus:
        """The status of a job.

        Raises:
            Exception: botocore's; there was no answer, or there is no such job.
        """
        key = (job.region, job.name)
        if key in self._ended:
            return self._ended[key]
        found = self._listed(job).get(job.name)
        if found is None or needs_description(found):  # a new job may not be listed yet
            found = self.describe(job)
        status = status_of(found)
        if status.is_terminal:
            self._ended[key] = status
        return status

    def describe(self, job: Job) -> Mapping[str, Any]:
        """All that SageMaker knows of a job."""
        client = self._clients.get("sagemaker", job.region)
        description: Mapping[str, Any] = client.describe_training_job(TrainingJobName=job.name)
        return description

    def arns(self, launch: str, region: str) -> dict[str, str]:
        """ARNs of all jobs of a launch by name, the oldest first."""
        found = self._list(launch, region)
        return {name: str(job["TrainingJobArn"]) for name, job in found.items()}

    def regions(self, launch: str) -> list[str]:
        """Where jobs of a launch are that have been asked for here."""
        with self._lock:
            return sorted({region for region, name in self._answers if name == launch})

    def is_going(self, launch: str, region: str) -> bool:
        """Whether any job of a launch has not ended, by a listing of now."""
        found = self._list(launch, region).values()
        return any(job["TrainingJobStatus"] in ("InProgress", "Stopping") for job in found)

    def _listed(self, job: Job) -> Mapping[str, Mapping[str, Any]]:
        """One listing serves all who ask within a moment."""
        with self._lock:
            answer = self._answers.setdefault((job.region, job.launch), _Answer())
        with answer.lock:
            if answer.at is None or self._clock() - answer.at >= self._refresh_s:
                answer.jobs, answer.error = {}, None
                try:
                    answer.jobs = self._list(job.launch, job.region)
                except Exception as error:  # botocore has no one base of its errors
                    # Whoever may not list may still describe.
                    answer.error = None if is_denied(error) else error
                answer.at = self._clock()
            if answer.error is not None:
                raise answer.error
            return answer.jobs

    def _list(self, launch: str, region: str) -> dict[str, Mapping[str, Any]]:
        client = self._clients.get("sagemaker", region)
        pages = client.get_paginator("list_training_jobs").paginate(
            NameContains=launch,
            SortBy="CreationTime",
            SortOrder="Ascending",
            PaginationConfig={"PageSize": _PAGE},
        )
        jobs = (job for page in pages for job in page["TrainingJobSummaries"])
        return {
            job["TrainingJobName"]: job
            for job in jobs
            if is_of_launch(job["TrainingJobName"], launch)
        }
