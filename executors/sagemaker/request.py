"""What SageMaker is asked for: a launch as CreateTrainingJob requests. Sends nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import TERM_GRACE_ENV
from diloco_cloud.executors.sagemaker.command import container_command
from diloco_cloud.executors.sagemaker.jobs import Job
from diloco_cloud.executors.sagemaker.limits import check_environment, check_timeout
from diloco_cloud.executors.sagemaker.secrets import SECRETS_ENV, secret_name
from diloco_cloud.executors.sagemaker.settings import Settings
from diloco_cloud.executors.sagemaker.source import CHANNEL, SOURCE_PATH
from diloco_cloud.launch_request import LaunchRequest

#: Seconds between a job's SIGTERM and its end, whatever ends it.
TERM_GRACE_S: Final = 120
#: Where a launch's output goes by default, in the bucket of its run.
_OUTPUT: Final = "sagemaker"
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_MOST_TAGS: Final = 50


@dataclass(frozen=True, kw_only=True)
class Launch:
    """All that the jobs of one launch have in common.

    Attributes:
        request: what is to be started.
        settings: of the executor.
        name: that jobs are named after.
        region: of AWS.
        role: ARN of the execution role.
        image: that they run.
        instance_types: in order of preference.
        timeout: seconds.
        words: the command of each replica.
        setup: a line of shell that prepares the container; None: the image is ready.
        source_uri: of uploaded sources; None: there are none.
    """

    request: LaunchRequest
    settings: Settings
    name: str
    region: str
    role: str
    image: str
    instance_types: Sequence[str]
    timeout: float
    words: Sequence[str]
    setup: str | None = None
    source_uri: str | None = None

    def job(self, rank: int) -> Job:
        """The training job of one rank."""
        return Job.named(self.name, rank, self.request.attempt, self.region)

    def creation(self, rank: int) -> dict[str, Any]:
        """The request that creates one rank's job.

        Raises:
            ConfigError: something of it is more than SageMaker takes.
        """
        settings = self.settings
        check_timeout(self.timeout)
        environment = self._environment(rank)
        check_environment(environment)
        output = output_uri(settings, self.request)
        creation: dict[str, Any] = {
            "TrainingJobName": self.job(rank).name,
            "RoleArn": self.role,
            "AlgorithmSpecification": {
                "TrainingImage": self.image,
                "TrainingInputMode": "File",
                **container_command(
                    self.words, has_secrets=bool(self.request.secrets), setup=self.setup
                ),
            },
            "OutputDataConfig": {"S3OutputPath": f"{output}/{self.name}"},
            "ResourceConfig": self._resources(),
            "StoppingCondition": {"MaxRuntimeInSeconds": max(1, int(self.timeout))},
            "Environment": environment,
            "Tags": self._tags(rank),
        }
        if settings.spot:
            creation["EnableManagedSpotTraining"] = True
            wait = creation["StoppingCondition"]["MaxRuntimeInSeconds"] + settings.spot_wait
            creation["StoppingCondition"]["MaxWaitTimeInSeconds"] = wait
        if settings.spot or settings.checkpoint_uri is not None:
            # One place for all lives of a rank, so that the next finds what the last one left.
            place = settings.checkpoint_uri or f"{output}/{self.name}/checkpoints"
            creation["CheckpointConfig"] = {"S3Uri": f"{place.rstrip('/')}/{rank:04d}"}
        if settings.retries:
            creation["RetryStrategy"] = {"MaximumRetryAttempts": settings.retries}
        if settings.subnets:
            creation["VpcConfig"] = {
                "Subnets": list(settings.subnets),
                "SecurityGroupIds": list(settings.security_groups),
            }
        if self.source_uri is not None:
            creation["InputDataConfig"] = [_channel(self.source_uri)]
        return merged(creation, settings.request)

    def _environment(self, rank: int) -> dict[str, str]:
        defaults = {
            "AWS_DEFAULT_REGION": self.region,
            "PYTHONUNBUFFERED": "1",  # a log is followed while it is written
            TERM_GRACE_ENV: str(TERM_GRACE_S),
        }
        given = self.request.environment(rank)
        if self.source_uri is not None:
            path = [SOURCE_PATH, given.get("PYTHONPATH", "")]
            given["PYTHONPATH"] = ":".join(filter(None, path))
        if self.request.secrets:
            given[SECRETS_ENV] = f"{self.region}:{secret_name(self.name)}"
        return {**defaults, **given}

    def _resources(self) -> dict[str, Any]:
        settings = self.settings
        resources: dict[str, Any] = {"InstanceCount": 1, "VolumeSizeInGB": settings.volume_gb}
        if settings.keep_alive:
            resources["KeepAlivePeriodInSeconds"] = settings.keep_alive
        if len(self.instance_types) == 1:
            return {"InstanceType": self.instance_types[0], **resources}
        if settings.spot:
            raise ConfigError(
                "a spot job takes one instance type, and several were named",
                fix="Name one, or leave spot out.",
            )
        return {
            "InstancePreferences": [{"InstanceType": name} for name in self.instance_types],
            **resources,
        }

    def _tags(self, rank: int) -> list[dict[str, str]]:
        tags = {
            **self.settings.tags,
            "diloco-run": self.name,
            "diloco-rank": str(rank),
            "diloco-attempt": str(self.request.attempt),
        }
        if len(tags) > _MOST_TAGS:
            raise ConfigError(f"there are {len(tags)} tags", fix=f"AWS takes {_MOST_TAGS}.")
        return [{"Key": key, "Value": str(value)} for key, value in tags.items()]


def output_uri(settings: Settings, request: LaunchRequest) -> str:
    """Where SageMaker may write: the one that was set, else the bucket that the run is in.

    Raises:
        ConfigError: none was set, and the run is in no bucket of Amazon's.
    """
    if settings.output_uri is not None:
        return settings.output_uri.rstrip("/")
    run = str(request.arguments.get("rendezvous_uri", ""))
    if run.startswith("s3://") and not any(name in request.env for name in _ENDPOINTS):
        return f"s3://{run.removeprefix('s3://').partition('/')[0]}/{_OUTPUT}"
    raise ConfigError(
        "SageMaker needs a place in Amazon S3 that it may write to",
        fix="Add --backend-arg output_uri=s3://bucket/prefix.",
    )


def merged(request: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A request with a user's own fields put in, table by table."""
    result = dict(request)
    for key, value in changes.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return result


def is_same_job(described: Mapping[str, Any], creation: Mapping[str, Any]) -> bool:
    """Whether a job that exists is the one that a request would create."""
    keys = ("TrainingImage", "ContainerEntrypoint", "ContainerArguments")
    old, new = (side.get("AlgorithmSpecification", {}) for side in (described, creation))
    return (
        all(old.get(key) == new.get(key) for key in keys)
        and described.get("RoleArn") == creation.get("RoleArn")
        and described.get("Environment") == creation.get("Environment")
    )


def _channel(uri: str) -> dict[str, Any]:
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": uri,
        "S3DataDistributionType": "FullyReplicated",
    }
    return {"ChannelName": CHANNEL, "DataSource": {"S3DataSource": source}}
