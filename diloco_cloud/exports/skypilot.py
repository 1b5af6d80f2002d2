"""A SkyPilot task: one managed job per replica, so that each is recovered by itself.

A task of several nodes would be one cluster in one region, which starts again as a whole.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from typing import Any, Final

from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import RANK_ENV, TERM_GRACE_ENV
from diloco_cloud.launch_request import LaunchRequest
from diloco_cloud.replica_command import replica_command

_GPU: Final = re.compile(r"[A-Za-z][\w-]*(?::[1-9]\d*)?")


def skypilot_task(
    request: LaunchRequest,
    *,
    name: str,
    image: str,
    timeout: float,
    restarts: int,
    gpu: str | None = None,
    secrets: Sequence[str] = (),
    infra: str | None = None,
    spot: bool = False,
    cpus: float | None = None,
    memory: str | None = None,
    grace: float = 60.0,
) -> dict[str, Any]:
    """The task that every replica of a run is launched from, each with its own ``REPLICA_RANK``.

    Args:
        request: a launch of all ranks, that has been checked.
        name: of the run.
        image: a container with diloco-cloud installed.
        timeout: seconds a replica may run.
        restarts: how often a replica that fails is started again; one that is preempted always is.
        gpu: in SkyPilot's words, such as "A100" or "H100:8".
        secrets: names of variables; ``sky jobs launch --secret NAME`` gives their values.
        infra: where, such as "aws/us-east-1" or "k8s"; default: wherever it is cheapest.
        spot: whether on spot machines.
        cpus: at least so many.
        memory: at least so many GB.
        grace: seconds between SIGTERM and SIGKILL.

    Raises:
        ConfigError: a GPU that SkyPilot could not be asked for.
    """
    if gpu is not None and not _GPU.fullmatch(gpu):
        raise ConfigError(
            f"{gpu!r} is not a GPU that SkyPilot could be asked for",
            fix='Write its name, or how many of them: "A100" or "A100:8".',
        )
    environment, other = request.environment(0), request.environment(1)
    common = {key: value for key, value in environment.items() if value == other[key]}
    ranked = [key for key in environment if key not in common and key != RANK_ENV]
    resources: dict[str, Any] = {
        **({"infra": infra} if infra else {}),
        **({"accelerators": gpu} if gpu else {}),
        **({"cpus": f"{cpus:g}+"} if cpus is not None else {}),
        **({"memory": f"{memory.removesuffix('GB')}+"} if memory is not None else {}),
        "image_id": f"docker:{image}",
        **({"use_spot": True} if spot else {}),
        "job_recovery": {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": restarts},
    }
    return {
        "name": name,
        "resources": resources,
        # Without a value: `sky jobs launch --env REPLICA_RANK=…` gives it, and must.
        "envs": {RANK_ENV: None, TERM_GRACE_ENV: f"{grace:g}", **common},
        **({"secrets": dict.fromkeys(secrets)} if secrets else {}),
        "run": _run(request, ranked, timeout, grace),
    }


def launch_commands(name: str, ranks: Sequence[int], secrets: Sequence[str], file: str) -> str:
    """What starts the replicas from a task that was written to ``file``."""
    given = "".join(f" --secret {secret}" for secret in secrets)
    numbers = " ".join(map(str, ranks))
    return (
        f"for rank in {numbers}; do sky jobs launch -y -d -n {name}-$rank "
        f"--env {RANK_ENV}=$rank{given} {shlex.quote(file)}; done"
    )


def _run(request: LaunchRequest, ranked: Sequence[str], timeout: float, grace: float) -> str:
    exports = "".join(f'export {name}="${RANK_ENV}"\n' for name in ranked)
    # Managed jobs have no time limit of their own.
    limit = f"timeout --kill-after={math.ceil(grace)} {math.ceil(timeout)}"
    return f"{exports}exec {limit} {shlex.join(replica_command(request))}\n"
