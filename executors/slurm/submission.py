"""What Slurm is asked for: a job array, one task per replica. Nothing here runs a command."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import TERM_GRACE_ENV
from diloco_cloud.executors.slurm.script import batch_script
from diloco_cloud.launch_request import LaunchRequest
from diloco_cloud.replica_command import replica_command
from diloco_cloud.secrets import Secret

#: Slurm looks at time limits twice a minute, and may send a signal that much too early.
_SIGNAL_SLACK_S: Final = 60.0
_GPU: Final = re.compile(r"(?:gpu:)?(?:(?P<kind>[A-Za-z][\w.-]*)(?::(?P<n>\d+))?|(?P<only>\d+))")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user says of the cluster; see :class:`SlurmExecutor`."""

    directory: str
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    cpus: int | None = None
    memory: str | None = None
    sbatch: tuple[str, ...] = ()
    setup: str = ""
    workdir: str | None = None
    python: str = "python3"
    requeue: bool = True
    shares_disk: bool = True


@dataclass(frozen=True)
class Submission:
    """One ``sbatch``.

    Attributes:
        argv: the command.
        script: what it reads from its standard input.
        job_name: the same for all launches of a run and attempt.
        token: tells this launch from another one of the same name and attempt; the same when it
            is repeated.
        base: directory of the run.
        ranks: of the replicas.
        attempt: which life of theirs.
        secrets: revealed in a file that each replica's directory gets.
    """

    argv: tuple[str, ...]
    script: str
    job_name: str
    token: str
    base: str
    ranks: tuple[int, ...]
    attempt: int
    secrets: Mapping[str, Secret] = field(default_factory=dict)

    def directory(self, rank: int) -> str:
        """Of one replica."""
        return f"{self.base}/{rank}.{self.attempt}-{self.token}"

    def to_json(self) -> dict[str, Any]:
        """What ``--dry-run`` shows."""
        return {"command": list(self.argv), "stdin": self.script}


def build(
    request: LaunchRequest,
    settings: Settings,
    *,
    name: str,
    gpu: str | None,
    timeout: float,
    grace: float,
) -> Submission:
    """Put a launch in Slurm's words.

    Args:
        request: a launch that has been checked.
        settings: of the cluster.
        name: of the run; unique.
        gpu: "a100", "a100:2" or "2".
        timeout: seconds each replica may run.
        grace: seconds between SIGTERM and SIGKILL.

    Raises:
        ConfigError: a GPU that Slurm could not be asked for.
    """
    base = f"{settings.directory}/{name}"
    job_name = job_name_of(name, request.attempt)
    token = token_of(request)
    suffix = f"{request.attempt}-{token}"
    options = [
        "--parsable",
        f"--job-name={job_name}",
        f"--comment={token}",
        f"--array={compressed(request.ranks)}",
        "--nodes=1",
        "--ntasks=1",
        # Nothing of the launcher's environment, which may hold secrets; and it would be stored.
        "--export=NONE",
        "--open-mode=append",
        f"--output={base.replace('%', '%%')}/%a.{suffix}/log.txt",
        f"--time={math.ceil(timeout / 60)}",
        "--requeue" if settings.requeue else "--no-requeue",
    ]
    if timeout > 2 * (grace + _SIGNAL_SLACK_S):  # else the script alone keeps the time
        options.append(f"--signal=B:USR1@{math.ceil(grace)}")
    if gpu is not None:
        options.append(f"--gres={gres(gpu)}")
    options += _placed(settings)
    return Submission(
        argv=("sbatch", *options),
        script=_script(
            request,
            settings,
            directory=f"{shlex.quote(base)}/$rank.{suffix}",
            timeout=timeout,
            grace=grace,
        ),
        job_name=job_name,
        token=token,
        base=base,
        ranks=request.ranks,
        attempt=request.attempt,
        secrets=request.secrets,
    )


def restricted(submission: Submission, ranks: Sequence[int]) -> Submission:
    """The submission of some of its ranks only."""
    old, new = (f"--array={compressed(chosen)}" for chosen in (submission.ranks, ranks))
    argv = tuple(new if word == old else word for word in submission.argv)
    return replace(submission, argv=argv, ranks=tuple(ranks))


def _placed(settings: Settings) -> list[str]:
    """Options that say where replicas run, and on how much."""
    named = {
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "cpus-per-task": settings.cpus,
        "mem": settings.memory,
        "chdir": settings.workdir,
    }
    given = [f"--{name}={value}" for name, value in named.items() if value is not None]
    return [*given, *settings.sbatch]


def _script(
    request: LaunchRequest, settings: Settings, *, directory: str, timeout: float, grace: float
) -> str:
    environment = request.environment(request.ranks[0])
    other = request.environment(request.ranks[0] + 1)
    common = {k: v for k, v in environment.items() if v == other[k]}
    fixed = {TERM_GRACE_ENV: f"{grace:g}", "PYTHONUNBUFFERED": "1"}
    import_path = os.pathsep.join(_own_import_path()) if settings.shares_disk else ""
    if import_path:
        fixed["PYTHONPATH"] = import_path
    return batch_script(
        replica_command(request, python=settings.python),
        directory=directory,
        common={**fixed, **common},
        ranked=[name for name in environment if name not in common],
        timeout=timeout,
        grace=grace,
        setup=settings.setup,
    )


def _own_import_path() -> list[str]:
    """Where this process imports from besides its interpreter: a trainer may live there."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    interpreters = tuple(os.path.join(prefix, "") for prefix in prefixes)
    entries = (os.path.abspath(entry) for entry in sys.path)
    own = [entry for entry in entries if not entry.startswith(interpreters)]
    return list(dict.fromkeys(own))


def job_name_of(name: str, attempt: int) -> str:
    """A life is found again by its job's name and its task's number, which is its rank."""
    return f"{name}.a{attempt}"


def token_of(request: LaunchRequest) -> str:
    """The same for two launches of the same things, wherever from."""
    asked = [replica_command(request), request.environment(0), sorted(request.secrets)]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:8]


def gres(gpu: str) -> str:
    """``--gres`` for one replica.

    Raises:
        ConfigError: it is not a kind of GPU, a number, or both.
    """
    match = _GPU.fullmatch(gpu)
    if match is None or (match["n"] or match["only"] or "1").strip("0") == "":
        raise ConfigError(
            f"{gpu!r} is not a GPU that Slurm could be asked for",
            fix='Write a kind, a number or both: "a100", "2" or "a100:2".',
        )
    if match["only"]:
        return f"gpu:{match['only']}"
    return f"gpu:{match['kind']}:{match['n'] or 1}"


def compressed(ranks: Sequence[int]) -> str:
    """Ranks as Slurm writes a list of numbers: ``0-2,5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
