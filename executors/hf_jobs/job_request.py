"""What the hub is asked for: one job per replica. Nothing here sends anything."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import TERM_GRACE_ENV
from diloco_cloud.launch_request import LaunchRequest
from diloco_cloud.replica_command import replica_command
from diloco_cloud.secrets import Secret

#: Labels that find a run's jobs again. The hub lists by labels, and gives no job a name of its own.
RUN_LABEL: Final = "diloco-run"
RANK_LABEL: Final = "diloco-rank"
ATTEMPT_LABEL: Final = "diloco-attempt"
#: Of one call of ``launch_replicas``: whatever carries it and is in no handle was started twice.
LAUNCH_LABEL: Final = "diloco-launch"

#: The image and what is installed in it, where the user names no image.
DEFAULT_IMAGE: Final = "python:3.12-slim"
#: A job's hardware where nobody asks for any; the hub's own default too.
DEFAULT_HARDWARE: Final = "cpu-basic"

_LABEL: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
_VARIABLE: Final = re.compile(r"[A-Za-z][_A-Za-z0-9]+")
_INSTALL: Final = 'pip install --quiet --no-input "$0" && exec "$@"'
HIDDEN: Final = "(sent as a secret)"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user says of the jobs; see :class:`HFJobsExecutor`.

    Attributes:
        brings_own: whether image or ``install`` are the user's, and may have a trainer of theirs.
    """

    hardware: str = DEFAULT_HARDWARE
    image: str = DEFAULT_IMAGE
    install: str | None = None
    python: str = "python"
    namespace: str | None = None
    attempts: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)
    resource_group: str | None = None
    grace: float = 10.0
    brings_own: bool = True

    def __post_init__(self) -> None:
        texts = ("hardware", "image", "install", "python", "namespace", "resource_group")
        for name in texts:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name} is {value!r}", fix="It must be a text.")
        if not isinstance(self.labels, Mapping):
            raise ConfigError(
                f"labels are {self.labels!r}", fix="""Write labels = { team = "ours" }."""
            )
        if self.attempts < 1:
            raise ConfigError(f"attempts is {self.attempts}", fix="It must be at least 1.")
        if self.grace < 0:
            raise ConfigError(f"grace is {self.grace}", fix="It must be at least 0 seconds.")
        for key, value in self.labels.items():
            _check_label(f"the label {key}", key)
            _check_label(f"the label {key}", value)
            if key.startswith("diloco-") or key == "name":
                raise ConfigError(
                    f"the label {key} is taken", fix="Choose one that does not begin with diloco-."
                )


@dataclass(frozen=True)
class JobRequest:
    """One job, as ``HfApi.run_job`` takes it.

    Attributes:
        rank: of the replica.
        name: shown by the hub.
        labels: find the job again.
        secrets: revealed where they are sent, as the request's ``secrets`` and nowhere else.
    """

    rank: int
    name: str
    image: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    flavor: str
    timeout: int
    attempts: int
    labels: Mapping[str, str]
    resource_group: str | None
    secrets: Mapping[str, Secret]

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``Hub.create``: of ``run_job``, with secrets still secret."""
        return {
            "image": self.image,
            "command": list(self.command),
            "env": dict(self.env),
            "secrets": dict(self.secrets) or None,
            "flavor": self.flavor,
            "timeout": self.timeout,
            "attempts": self.attempts,
            "name": self.name,
            "labels": dict(self.labels),
            "resource_group_id": self.resource_group,
        }

    def preview(self, namespace: str | None) -> dict[str, Any]:
        """The same as JSON, for people to read; no secret's value is in it."""
        shown = {**self.arguments(), "secrets": dict.fromkeys(self.secrets, HIDDEN)}
        given = {key: value for key, value in shown.items() if value not in (None, {})}
        return {"run_job": {**given, "namespace": namespace or "(the owner of the token)"}}


def build_requests(
    request: LaunchRequest,
    settings: Settings,
    *,
    name: str,
    gpu: str | None,
    timeout: float,
    launch_id: str,
) -> list[JobRequest]:
    """The jobs of one launch, in the order of its ranks.

    Args:
        request: checked.
        settings: of the executor.
        name: of the run.
        gpu: the hardware's name, if it is not that of the settings.
        timeout: seconds each job may run.
        launch_id: another one for every launch.

    Raises:
        ConfigError: a name or a variable that the hub would not take.
    """
    _check_label("the run's name", name)
    _check_variables(request)
    if request.imports and not settings.brings_own:
        raise ConfigError(
            f"the trainer's module {request.imports[0]!r} would not be in {settings.image}",
            fix="Name an image that has it, --backend-arg image=…, or something for pip that "
            "brings it and diloco-cloud, --backend-arg install=…",
        )
    command = replica_command(request, python=settings.python)
    if settings.install is not None:
        # The first word after the script is its $0, and needs no quotes of ours.
        command = ["sh", "-c", _INSTALL, settings.install, *command]
    return [
        JobRequest(
            rank=rank,
            name=_job_name(name, rank, request.attempt),
            image=settings.image,
            command=tuple(command),
            env={**request.environment(rank), TERM_GRACE_ENV: f"{settings.grace:g}"},
            flavor=gpu or settings.hardware,
            timeout=math.ceil(timeout),
            attempts=settings.attempts,
            labels={
                **settings.labels,
                RUN_LABEL: name,
                RANK_LABEL: str(rank),
                ATTEMPT_LABEL: str(request.attempt),
                LAUNCH_LABEL: launch_id,
            },
            resource_group=settings.resource_group,
            secrets=request.secrets,
        )
        for rank in request.ranks
    ]


def _job_name(name: str, rank: int, attempt: int) -> str:
    ending = f"-{rank}.{attempt}"
    return f"{name[: 100 - len(ending)]}{ending}"


def _check_label(what: str, text: str) -> None:
    if not isinstance(text, str) or _LABEL.fullmatch(text) is None:
        raise ConfigError(
            f"{what} is {text!r}, which the hub does not take",
            fix="Use at most 100 letters, digits, dots, dashes and underscores.",
        )


def _check_variables(request: LaunchRequest) -> None:
    for name in (*request.environment(0), *request.secrets):
        if _VARIABLE.fullmatch(name) is None:
            raise ConfigError(
                f"the hub does not take the variable {name!r}",
                fix="It must begin with a letter, go on with letters, digits and underscores, "
                "and have 2 characters or more.",
            )
    if request.secrets and _prints_requests():
        raise ConfigError(
            "HF_DEBUG is set, with which huggingface_hub prints the secrets it sends",
            fix="unset HF_DEBUG",
        )


def _prints_requests() -> bool:
    """Whether huggingface_hub was told to, or will be as soon as it is imported."""
    loaded = sys.modules.get("huggingface_hub.constants")
    said = os.environ.get("HF_DEBUG", "").upper() in ("1", "TRUE", "YES", "ON")
    return said or bool(getattr(loaded, "HF_DEBUG", False))
