"""From a launch's arguments to everything it will send; knows the machine, asks nobody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import LaunchOptions, Script
from diloco_cloud.executors.sagemaker import limits, secrets
from diloco_cloud.executors.sagemaker.clients import training_instances
from diloco_cloud.executors.sagemaker.dlc import deep_learning_image, default_package, setup_line
from diloco_cloud.executors.sagemaker.instances import instance_types
from diloco_cloud.executors.sagemaker.jobs import launch_name
from diloco_cloud.executors.sagemaker.request import Launch, output_uri
from diloco_cloud.executors.sagemaker.settings import Settings
from diloco_cloud.executors.sagemaker.source import Sources
from diloco_cloud.launch_request import LaunchRequest
from diloco_cloud.replica_command import replica_command


@dataclass(frozen=True)
class Plan:
    """A launch that can be sent.

    Attributes:
        launch: what its jobs have in common.
        creations: CreateTrainingJob requests, in the order of ``launch.request.ranks``.
        sources: to be uploaded first; None: there are none, or they have been.
    """

    launch: Launch
    creations: tuple[dict[str, Any], ...]
    sources: Sources | None

    def preview(self) -> list[dict[str, Any]]:
        """All requests that change something, as JSON values; of secrets, only the names."""
        before: list[dict[str, Any]] = []
        if self.sources is not None:
            before.append({"s3:PutObject": self.launch.source_uri, "files": [*self.sources.files]})
        names = sorted(self.launch.request.secrets)
        if names:
            before.append(
                {"secretsmanager:CreateSecret": secrets.creation(self.launch.name, names)}
            )
        return [*before, *({"sagemaker:CreateTrainingJob": one} for one in self.creations)]


def plan_launch(
    request: LaunchRequest,
    settings: Settings,
    options: LaunchOptions,
    *,
    region: str,
    gpu: str | None,
    timeout: float,
) -> Plan:
    """Plan a launch.

    Args:
        request: what is to be started.
        settings: of the executor.
        options: whose name the jobs get.
        region: of AWS.
        gpu: of the launch; None: the executor's own.
        timeout: seconds.

    Raises:
        UsageError: SageMaker could not satisfy it, as far as this machine can tell.
    """
    if isinstance(request.target, Script):
        raise ConfigError(
            f"the script {request.target.path!r} is on this machine, not in the container",
            fix='Put it in a module, and name it: "package.module:function".',
        )
    role = limits.check_role(settings.role)
    types = instance_types(gpu or settings.instance_type, training_instances())
    image, setup = settings.image, None
    if image is None:
        _check_imports(request, settings)
        image = deep_learning_image(settings.pytorch, region, types[0])
        setup = setup_line(settings.package or default_package())
    limits.check_image(image, region)
    name = launch_name(options)
    sources, source_uri = None, None
    if settings.source_dir is not None:
        source_uri = f"{output_uri(settings, request)}/{name}/source/"
        sources = Sources.read(settings.source_dir) if request.attempt == 0 else None
    launch = Launch(
        request=request,
        settings=settings,
        name=name,
        region=region,
        role=role,
        image=image,
        instance_types=types,
        timeout=timeout,
        words=replica_command(request),
        setup=setup,
        source_uri=source_uri,
    )
    return Plan(launch, tuple(launch.creation(rank) for rank in request.ranks), sources)


def _check_imports(request: LaunchRequest, settings: Settings) -> None:
    """Refuse a trainer that nothing would bring into AWS's own container."""
    if request.imports and settings.source_dir is None and settings.package is None:
        raise ConfigError(
            f"the trainer's module {request.imports[0]!r} would not be in AWS's container",
            fix="Add the folder that it is imported from, --backend-arg source_dir=., or name an "
            "image that has it, --backend-arg image=…",
        )
