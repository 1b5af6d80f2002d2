"""Sending a launch: all of its jobs are created, or none is left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diloco_cloud.errors import DilocoError, LaunchError
from diloco_cloud.executor import ReplicaHandle
from diloco_cloud.executors.sagemaker import secrets
from diloco_cloud.executors.sagemaker.clients import Clients
from diloco_cloud.executors.sagemaker.faults import code_of, message_of, translated, was_retried
from diloco_cloud.executors.sagemaker.jobs import Job
from diloco_cloud.executors.sagemaker.planning import Plan
from diloco_cloud.executors.sagemaker.request import is_same_job

logger = logging.getLogger(__name__)

_GOING_ON = ("InProgress", "Stopping")
#: Names to try for one job.
_NAMES = 3


def start_jobs(
    clients: Clients, plan: Plan, on_launched: Callable[[ReplicaHandle], None] | None
) -> list[ReplicaHandle]:
    """Create the jobs of a launch.

    Args:
        clients: of AWS.
        plan: the launch.
        on_launched: told of each handle as soon as there is one.

    Raises:
        UsageError: AWS does not allow it.
        LaunchError: AWS failed; what had been created was stopped.
    """
    launch = plan.launch
    client = clients.get("sagemaker", launch.region, patient=True)
    handles: list[ReplicaHandle] = []
    asked: list[str] = []
    new_secrets = False
    try:
        new_secrets = _prepare(clients, plan)
        for rank, creation in zip(launch.request.ranks, plan.creations, strict=True):
            try:
                job, arn = _create(client, launch.job(rank), creation, asked)
            except DilocoError:
                raise
            except Exception as error:  # botocore has no one base of its errors
                raise translated(error, f"start replica {rank}") from error
            handles.append(job.handle(arn=arn, has_secrets=bool(launch.request.secrets)))
            if on_launched is not None:
                on_launched(handles[-1])
    except BaseException:
        _roll_back(client, asked)
        if new_secrets:
            _forget_secrets(clients, plan)
        raise
    return handles


def _prepare(clients: Clients, plan: Plan) -> bool:
    """Upload sources and keep secrets; whether the secrets are the first of their name."""
    launch = plan.launch
    try:
        if plan.sources is not None and launch.source_uri is not None:
            plan.sources.upload(clients.get("s3", launch.region, patient=True), launch.source_uri)
    except Exception as error:  # botocore has no one base of its errors
        raise translated(error, f"upload the sources to {launch.source_uri}") from error
    if not launch.request.secrets:
        return False
    try:
        manager = clients.get("secretsmanager", launch.region, patient=True)
        return secrets.keep(manager, launch.name, launch.request.secrets)
    except Exception as error:
        failure = translated(
            error, "keep the secrets in AWS Secrets Manager", launch.request.secrets.values()
        )
    raise failure  # out of the handler: neither as its cause nor as its context may that one go on


def _create(
    client: Any, job: Job, creation: Mapping[str, Any], asked: list[str]
) -> tuple[Job, str]:
    """Create a job under its name, or a similar one where that is another job's; and its ARN.

    Names of jobs are unique for ever, and a run's id need not be.

    Args:
        client: of SageMaker.
        job: to be created.
        creation: the request.
        asked: gets the name before it is asked for, and loses it if it is another job's.
    """
    for _ in range(_NAMES):
        asked.append(job.name)
        arn = _create_once(client, {**creation, "TrainingJobName": job.name})
        if arn is not None:
            return job, arn
        asked.pop()
        job = job.renamed()
    raise LaunchError(
        f"training jobs named {creation['TrainingJobName']} exist already",
        fix="Launch under another run id.",
    )


def _create_once(client: Any, creation: Mapping[str, Any]) -> str | None:
    """Create a job, or find the one that a lost answer was about; its ARN.

    None where the name is another job's.
    """
    try:
        return str(client.create_training_job(**creation)["TrainingJobArn"])
    except client.exceptions.ClientError as error:
        if code_of(error) != "ResourceInUse":
            raise
        name = creation["TrainingJobName"]
        found = client.describe_training_job(TrainingJobName=name)
        ours = found["TrainingJobStatus"] in _GOING_ON or was_retried(error)
        if not (ours and is_same_job(found, creation)):
            return None
        logger.info("training job %s exists already; it is taken for this replica's", name)
        return str(found["TrainingJobArn"])


def _roll_back(client: Any, names: Sequence[str]) -> None:
    """Stop what was created, and what may have been; never raises."""
    for name in names:
        try:
            client.stop_training_job(TrainingJobName=name)
        except Exception as error:  # botocore has no one base of its errors
            if code_of(error) not in ("ValidationException", "ResourceNotFound"):
                logger.error("training job %s may go on: %s", name, message_of(error))


def _forget_secrets(clients: Clients, plan: Plan) -> None:
    try:
        manager = clients.get("secretsmanager", plan.launch.region)
        secrets.forget(manager, plan.launch.name)
    except Exception as error:  # it costs cents, and the launch's own error matters more
        logger.error("a secret of %s was left behind: %s", plan.launch.name, message_of(error))
