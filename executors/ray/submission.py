"""What Ray is asked for: one job per replica. Nothing here sends anything."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import TERM_GRACE_ENV
from diloco_cloud.executors.ray.states import LITERALS
from diloco_cloud.launch_request import LaunchRequest
from diloco_cloud.replica_command import replica_command
from diloco_cloud.secrets import Secret

RUNNER: Final = "diloco_cloud.executors.ray.runner"
#: Read by Ray in the process that stands by a job: seconds between SIGTERM and SIGKILL. Three
#: seconds as it comes, in which no replica could hand over.
STOP_WAIT: Final = "RAY_JOB_STOP_WAIT_TIME_S"
#: Of a job, by which its run is found again.
RUN_KEY, RANK_KEY, ATTEMPT_KEY = "diloco_run", "diloco_rank", "diloco_attempt"
_GPU: Final = re.compile(r"(?:(?P<kind>[A-Za-z][\w.-]*)(?::(?P<n>\d+))?|(?P<only>\d+))")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user says of the cluster; see :class:`RayJobsExecutor`."""

    python: str = "python"
    cpus: float = 1.0
    resources: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    secrets_dir: str | None = None
    cluster_secrets: tuple[str, ...] = ()
    grace: float = 30.0


@dataclass(frozen=True)
class Submission:
    """One job.

    Attributes:
        rank: of the replica.
        submission_id: the same whenever the launch is repeated.
        body: of the request.
        secrets_file: path of the file that the replica takes its secrets from; None for none.
    """

    rank: int
    submission_id: str
    body: dict[str, Any]
    secrets_file: str | None


@dataclass(frozen=True)
class Gpu:
    """GPUs of one replica; ``kind`` is Ray's ``accelerator_type``, or None for any."""

    count: int = 0
    kind: str | None = None

    @property
    def resource(self) -> str | None:
        """What nodes that have this kind offer."""
        return None if self.kind is None else f"accelerator_type:{self.kind}"


def build(
    request: LaunchRequest, settings: Settings, *, name: str, gpu: str | None, timeout: float
) -> list[Submission]:
    """Put a launch in Ray's words, a job per rank, in the order of its ranks.

    Args:
        request: a launch that has been checked.
        settings: of the cluster.
        name: of the run; unique.
        gpu: "A100", "A100:2" or "2".
        timeout: seconds each replica may run.

    Raises:
        ConfigError: a GPU that Ray could not be asked for, or secrets that would have to travel in
            the open.
    """
    check_secrets(request.secrets, settings)
    wanted = parse_gpu(gpu)
    token = token_of(request)
    return [
        _submission(request, settings, rank, name, token, wanted, timeout) for rank in request.ranks
    ]


def _submission(
    request: LaunchRequest,
    settings: Settings,
    rank: int,
    name: str,
    token: str,
    gpu: Gpu,
    timeout: float,
) -> Submission:
    submission_id = f"{name}.r{rank}.a{request.attempt}.{token}"
    sent = sorted(set(request.secrets) - set(settings.cluster_secrets))
    file = secrets_file(settings, submission_id) if sent else None
    kept = sorted(set(request.secrets) & set(settings.cluster_secrets))
    return Submission(
        rank=rank,
        submission_id=submission_id,
        body={
            "submission_id": submission_id,
            "entrypoint": _entrypoint(request, settings, timeout, file, kept),
            "runtime_env": _runtime_env(request, settings, rank),
            "metadata": {
                RUN_KEY: name,
                RANK_KEY: str(rank),
                ATTEMPT_KEY: str(request.attempt),
            },
            # Without any resource Ray would run the job on the head node.
            "entrypoint_num_cpus": settings.cpus,
            **({"entrypoint_num_gpus": gpu.count} if gpu.count else {}),
            **_resources(settings, gpu),
        },
        secrets_file=file,
    )


def _resources(settings: Settings, gpu: Gpu) -> dict[str, Any]:
    # A thousandth, as Ray's own `accelerator_type=` asks for: the kind is a place, not a quantity.
    kind = {gpu.resource: 0.001} if gpu.resource is not None else {}
    resources = {**settings.resources, **kind}
    return {"entrypoint_resources": resources} if resources else {}


def _entrypoint(
    request: LaunchRequest,
    settings: Settings,
    timeout: float,
    file: str | None,
    kept: list[str],
) -> str:
    words = [settings.python, "-m", RUNNER, f"--timeout={timeout:g}", f"--grace={settings.grace:g}"]
    if file is not None:
        words.append(f"--secrets={file}")
    words += [f"--expect={name}" for name in kept]
    return "exec " + shlex.join([*words, "--", *replica_command(request, python=settings.python)])


def _runtime_env(request: LaunchRequest, settings: Settings, rank: int) -> dict[str, Any]:
    given = dict(settings.runtime_env)
    own = request.environment(rank)
    literals = {name: value for name, value in own.items() if "$" in value}
    variables = {
        TERM_GRACE_ENV: f"{settings.grace:g}",
        STOP_WAIT: str(math.ceil(settings.grace)),
        **given.pop("env_vars", {}),
        **{name: value for name, value in own.items() if name not in literals},
    }
    if literals:
        variables[LITERALS] = json.dumps(literals).replace("$", "\\u0024")
    return {**given, "env_vars": variables}


def secrets_file(settings: Settings, submission_id: str) -> str | None:
    """Where a job finds its secrets; None if they do not travel by files."""
    if settings.secrets_dir is None or "/" in submission_id:  # a path is nothing of ours
        return None
    return f"{settings.secrets_dir}/{submission_id}"


def check_secrets(secrets: Mapping[str, Secret], settings: Settings) -> None:
    """Refuse secrets that Ray would show to everybody who sees its dashboard."""
    open_ones = sorted(set(secrets) - set(settings.cluster_secrets))
    if open_ones and settings.secrets_dir is None:
        raise ConfigError(
            f"Ray has no channel for secrets, and {open_ones[0]} would be seen by everybody",
            fix=f"""If its nodes have it: --backend-arg 'cluster_secrets=["{open_ones[0]}"]'. """
            "If they share a disk with this machine: --backend-arg secrets_dir=/a/directory/there.",
        )


def parse_gpu(gpu: str | None) -> Gpu:
    """GPUs of one replica.

    Raises:
        ConfigError: it is not a kind of GPU, a number, or both.
    """
    if gpu is None:
        return Gpu()
    match = _GPU.fullmatch(gpu)
    if match is None or (match["n"] or match["only"] or "1").strip("0") == "":
        raise ConfigError(
            f"{gpu!r} is not a GPU that Ray could be asked for",
            fix='Write a kind, a number or both: "A100", "2" or "A100:2".',
        )
    if match["only"]:
        return Gpu(int(match["only"]))
    return Gpu(int(match["n"] or 1), match["kind"])


def token_of(request: LaunchRequest) -> str:
    """The same for two launches of the same things, wherever from."""
    asked = [replica_command(request), request.environment(0), sorted(request.secrets)]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:8]
