"""What the cluster can and cannot do, asked before anything is submitted; and its refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from diloco_cloud.errors import ConfigError, DilocoError, LaunchError
from diloco_cloud.executors.slurm.commands import CommandError, NoCommandError, Output, Run
from diloco_cloud.executors.slurm.submission import Submission

#: Seconds between SIGTERM and SIGKILL where the cluster does not tell: Slurm's own default.
DEFAULT_GRACE_S: Final = 30.0
_KILL_WAIT: Final = re.compile(r"^KillWait\s*=\s*(\d+)", re.M)
_TIME_LIMIT: Final = re.compile(r"(?:(?P<d>\d+)-)?(?:(?P<h>\d+):)?(?P<m>\d+):(?P<s>\d+)")


@dataclass(frozen=True)
class Partition:
    """A partition, as sinfo shows it.

    Attributes:
        is_default: jobs go there that name none.
        limit_s: seconds a job may run; None for ever.
        gpus: generic resources of its nodes.
    """

    name: str
    is_default: bool
    limit_s: float | None
    gpus: str


def kill_wait(run: Run) -> float:
    """Seconds that a job has between SIGTERM and SIGKILL."""
    try:
        done = run(["scontrol", "show", "config"], "")
    except CommandError:  # the submission will say what is wrong
        return DEFAULT_GRACE_S
    match = _KILL_WAIT.search(done.out)
    return float(match[1]) if match else DEFAULT_GRACE_S


def partitions(run: Run) -> list[Partition]:
    """The partitions there are; none where sinfo cannot tell."""
    try:
        done = run(["sinfo", "--noheader", "--format=%P|%l|%G"], "")
    except CommandError:
        return []
    found = []
    for line in done.out.splitlines():
        name, _, rest = line.partition("|")
        limit, _, gpus = rest.partition("|")
        gpus = "" if gpus == "(null)" else gpus
        found.append(Partition(name.rstrip("*"), name.endswith("*"), _seconds(limit), gpus))
    return found


def check_time_limit(run: Run, partition: str | None, timeout: float) -> None:
    """Refuse a timeout that the partition does not allow: such a job would wait for ever.

    Raises:
        ConfigError: it is too long.
    """
    known = partitions(run)
    wanted = set(partition.split(",")) if partition else None
    chosen = [p for p in known if (p.is_default if wanted is None else p.name in wanted)]
    limits = [p.limit_s for p in chosen]
    if not chosen or None in limits:
        return
    longest = max(limit for limit in limits if limit is not None)
    if timeout > longest:
        others = [p.name for p in known if p.limit_s is None or p.limit_s >= timeout]
        fix = f"Set --timeout {_text(longest)} or less"
        if others:
            fix += f", or --backend-arg partition={others[0]}"
        raise ConfigError(
            f"the timeout of {_text(timeout)} is beyond the {_text(longest)} that partition "
            f"{','.join(p.name for p in chosen)} allows",
            fix=f"{fix}.",
        )


def rehearse(run: Run, submission: Submission) -> None:
    """Let sbatch check a submission without making it.

    Raises:
        UsageError: it would be refused; or there is no Slurm here.
        LaunchError: Slurm does not answer.
    """
    argv = ["sbatch", "--test-only", *submission.argv[1:]]
    try:
        done = run(argv, submission.script)
    except NoCommandError as error:
        raise no_slurm(error) from None
    except CommandError as error:
        raise LaunchError(
            f"Slurm cannot be asked: {error}", fix="Check --backend-arg host=, and that it is up."
        ) from None
    refused = refusal(run, done) if done.code != 0 else None
    if isinstance(refused, ConfigError):
        raise refused


def no_slurm(error: CommandError) -> ConfigError:
    """The error for a machine that has no Slurm commands."""
    return ConfigError(
        f"Slurm cannot be used from here: {error}",
        fix="Launch from a login node, or name one: --backend-arg host=LOGIN_NODE (by ssh).",
    )


def refusal(run: Run, done: Output) -> DilocoError:
    """The error for an sbatch that came back without a job."""
    said = done.complaint.removeprefix("allocation failure: ")
    said = said.removeprefix("Batch job submission failed: ")
    message = f"Slurm refuses the job: {said}"
    for pattern, advice in _ADVICE.items():
        if re.search(pattern, done.err, re.I):
            return ConfigError(message, fix=advice(run) if callable(advice) else advice)
    return LaunchError(message, fix="Nothing was started; `sinfo` and `squeue` show the cluster.")


def _advise_partition(run: Run) -> str:
    names = [p.name for p in partitions(run)]
    return f"Set --backend-arg partition= to one of: {', '.join(dict.fromkeys(names))}."


def _advise_hardware(run: Run) -> str:
    gpus = {gres for p in partitions(run) for gres in p.gpus.split(",") if gres}
    offered = ", ".join(sorted(re.sub(r"\(.*?\)", "", gres) for gres in gpus))
    return f"Its nodes have: {offered or 'no GPU'}. Change --gpu, or cpus and memory."


#: Of refusals that the user can mend, the first that fits. Slurm's own words, of slurm_errno.c.
_ADVICE: Final[dict[str, str | Callable[[Run], str]]] = {
    r"violates accounting": "You have too many jobs, or ask for too much: `squeue --me`.",
    r"account or account": "Set --backend-arg account= to one of yours (`sacctmgr show assoc`).",
    r"partition": _advise_partition,
    r"generic resource|gres|node configuration|CPU count": _advise_hardware,
    r"qos": "Set --backend-arg qos= to one of yours (`sacctmgr show assoc`).",
    r"time limit": "Set a shorter --timeout, or another --backend-arg partition=.",
    r"array": "Ranks must be below the cluster's MaxArraySize (`scontrol show config`).",
    r"feature": "Change --constraint in --backend-arg sbatch=.",
    r"unrecognized option|invalid option": "Correct --backend-arg sbatch=.",
}


def _seconds(text: str) -> float | None:
    """A time limit of sinfo: ``1-00:00:00``, ``30:00`` or ``infinite``."""
    match = _TIME_LIMIT.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(match[unit] or 0) for unit in "dhms")
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _text(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes / 60:g}h" if minutes >= 60 else f"{minutes:g}m"
