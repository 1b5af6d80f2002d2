"""SageMaker's training jobs: the operations that a launcher uses."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fakes.aws_errors import AwsError, not_found
from fakes.aws_identity import Identity
from fakes.aws_job import TrainingJob
from fakes.aws_logs import Logs


class Training:
    """All training jobs of one account and region.

    Attributes:
        jobs: by name.
        term_grace_s: seconds between a job's SIGTERM and its end; the real one has 120.
        start_delay_s: seconds that a job takes to start.
        interruption_s: seconds that a spot job is shown as interrupted.
        full: while it is set, there is no capacity, and jobs wait.
        failures: FailureReasons of the next jobs that are to be placed.
        quota: jobs that may go on at once; None: any number.
    """

    def __init__(
        self,
        directory: Path,
        logs: Logs,
        identity: Identity,
        *,
        region: str,
        account: str,
        container_environment: Callable[[], dict[str, str]],
        download: Callable[[dict[str, Any], Path], None],
    ) -> None:
        self.directory = directory
        self.logs = logs
        self.container_environment = container_environment
        self.download = download
        self._identity = identity
        self._arn = f"arn:aws:sagemaker:{region}:{account}:training-job/"
        self.lock = threading.RLock()
        self.jobs: dict[str, TrainingJob] = {}
        self.term_grace_s = 5.0
        self.start_delay_s = 0.0
        self.interruption_s = 0.2
        self.full = threading.Event()
        self.failures: deque[str] = deque()
        self.quota: int | None = None

    def CreateTrainingJob(self, params: dict[str, Any]) -> dict[str, Any]:
        self._judge(params)
        with self.lock:
            name = params["TrainingJobName"]
            if name in self.jobs:
                message = (
                    "Training job names must be unique within an AWS account and region, and a "
                    f"training job with this name already exists ({self._arn}{name})"
                )
                raise AwsError("ResourceInUse", message)
            self._check_quota(params)
            job = self.jobs[name] = TrainingJob(self, params, self._arn + name)
        job.start()
        return {"TrainingJobArn": job.arn}

    def DescribeTrainingJob(self, params: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            return self._known(params).description()

    def ListTrainingJobs(self, params: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            wanted = params.get("NameContains", "").lower()
            found = [job for name, job in self.jobs.items() if wanted in name.lower()]
            if params.get("SortOrder") != "Ascending":
                found.reverse()
            start, size = int(params.get("NextToken", "0")), params.get("MaxResults", 10)
            answer: dict[str, Any] = {
                "TrainingJobSummaries": [job.summary() for job in found[start : start + size]]
            }
        if start + size < len(found):
            answer["NextToken"] = str(start + size)
        return answer

    def StopTrainingJob(self, params: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            job = self._known(params)
            if job.is_over or job.status == "Stopping":
                message = (
                    f"The request was rejected because the training job is in status {job.status}"
                )
                raise AwsError("ValidationException", message)
            job.stop()
        return {}

    def UpdateTrainingJob(self, params: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            job = self._known(params)
            if job.warm_pool is None or job.warm_pool["Status"] != "Available":
                raise AwsError("ValidationException", "there is no warm pool to update")
            if params["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 0:
                job.warm_pool["Status"] = "Terminated"
        return {"TrainingJobArn": job.arn}

    def take_warm_pool(self, job: TrainingJob) -> None:
        """Give a job the instance of an earlier one that is like it, if one is kept."""
        keys = ("InstanceType", "InstanceCount", "VolumeSizeInGB")
        with self.lock:
            for other in self.jobs.values():
                same = all(
                    other.creation["ResourceConfig"].get(key)
                    == job.creation["ResourceConfig"].get(key)
                    for key in keys
                )
                pool = other.warm_pool
                if pool is not None and pool["Status"] == "Available" and same:
                    pool.update(Status="Reused", ReusedByJob=job.name)
                    job.warm_pool = {"Status": "InUse"}
                    return

    def close(self) -> None:
        """End all jobs."""
        self.term_grace_s = 0.0
        for job in self.jobs.values():
            if not job.is_over:
                job.stop()
        for job in self.jobs.values():
            job.join()

    def _known(self, params: dict[str, Any]) -> TrainingJob:
        job = self.jobs.get(params["TrainingJobName"])
        if job is None:
            raise not_found()
        return job

    def _judge(self, params: dict[str, Any]) -> None:
        """Rules that are in the service, and not in its model."""
        if not self._identity.can_assume(params["RoleArn"]):
            message = (
                f"Could not assume role {params['RoleArn']}. Please ensure that the role exists "
                "and allows principal 'sagemaker.amazonaws.com' to assume the role."
            )
            raise AwsError("ValidationException", message)
        spot = params.get("EnableManagedSpotTraining", False)
        resources, limits = params["ResourceConfig"], params["StoppingCondition"]
        wait = limits.get("MaxWaitTimeInSeconds")
        if spot and (wait is None or wait < limits["MaxRuntimeInSeconds"]):
            raise AwsError(
                "ValidationException", "MaxWaitTimeInSeconds is below MaxRuntimeInSeconds"
            )
        if not spot and wait is not None:
            raise AwsError("ValidationException", "MaxWaitTimeInSeconds is for spot training only")
        if spot and (
            resources.get("KeepAlivePeriodInSeconds") or "InstancePreferences" in resources
        ):
            raise AwsError("ValidationException", "not with managed spot training")
        if ("InstanceType" in resources) == ("InstancePreferences" in resources):
            raise AwsError("ValidationException", "InstanceType or InstancePreferences is needed")

    def _check_quota(self, params: dict[str, Any]) -> None:
        going = sum(not job.is_over for job in self.jobs.values())
        if self.quota is not None and going >= self.quota:
            kind = params["ResourceConfig"].get("InstanceType")
            message = (
                f"The account-level service limit '{kind} for training job usage' is {self.quota} "
                f"Instances, with current utilization of {going} Instances and a request delta of "
                "1 Instances. Please use AWS Service Quotas to request an increase for this quota."
            )
            raise AwsError("ResourceLimitExceeded", message)
