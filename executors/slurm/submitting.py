"""Submitting job arrays, so that a reply that is lost costs nothing; and finding them again."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Final

from diloco_cloud.errors import DilocoError, LaunchError
from diloco_cloud.executors.slurm import cluster
from diloco_cloud.executors.slurm.commands import CommandError, NoCommandError, Run
from diloco_cloud.executors.slurm.queue import Task, ask
from diloco_cloud.executors.slurm.replica import SlurmReplica
from diloco_cloud.executors.slurm.script import secret_assignments
from diloco_cloud.executors.slurm.submission import Submission, job_name_of, restricted
from diloco_cloud.secrets import redacted

logger = logging.getLogger(__name__)

#: Makes directories, each with the secrets that standard input brings, if it brings any.
_PREPARE: Final = (
    "umask 077; text=$(cat); for d; do "
    'mkdir -p -- "$d" && { [ -z "$text" ] || printf "%s\\n" "$text" > "$d/secrets"; } || exit 1; '
    "done"
)
#: Removes directories, and the first one if it is empty then.
_CLEAR: Final = 'base=$1; shift; rm -rf -- "$@"; rmdir -- "$base" 2>/dev/null; true'
#: Prints the directories of a run's replicas, and the jobs that started them.
_LIST: Final = (
    'cd "$1" 2>/dev/null || exit 0; '
    'for d in *.*-*; do [ -f "$d/job" ] && echo "$d $(cat "$d/job")"; done; true'
)
_DIRECTORY: Final = re.compile(r"(\d+)\.(\d+)-(\w+) (\d+)")
#: What sbatch says when the controller may have taken the job all the same.
_REPLY_LOST: Final = re.compile(r"timed out|connection reset|zero bytes|connect failure", re.I)
#: Looks for a job whose submission was not answered, and the seconds between two.
_LOOKS: Final = 5
_PAUSE_S: Final = 2.0


class _UnansweredError(LaunchError):
    """A submission of which nothing is known."""


def submit(
    run: Run, submission: Submission, *, sleep: Callable[[float], None]
) -> list[SlurmReplica]:
    """Submit what is not there yet; the replicas, in the order of their ranks' list.

    Args:
        run: runs a command.
        submission: its job name is this launch's alone, or a run's own.
        sleep: waits that many seconds.

    Raises:
        UsageError: Slurm refuses it.
        LaunchError: it cannot be submitted.
    """
    found = _existing(run, submission)
    missing = [rank for rank in submission.ranks if rank not in found]
    if missing:
        wanted = restricted(submission, missing)
        _prepare(run, wanted)
        try:
            job = _sbatch(run, wanted, sleep)
        except _UnansweredError:  # it may be there, and need its directories
            raise
        except DilocoError:
            _clear(run, wanted)
            raise
        found |= dict.fromkeys(missing, job)
    return [SlurmReplica.submitted(submission, found[rank], rank) for rank in submission.ranks]


def _existing(run: Run, submission: Submission) -> dict[int, str]:
    """Jobs by rank that an earlier call, whose reply was lost, has submitted."""
    try:
        return {task: array for array, task in _tasks(run, submission)}
    except NoCommandError as error:
        raise cluster.no_slurm(error) from None
    except CommandError as error:
        raise _unreachable(error) from None


def _prepare(run: Run, submission: Submission) -> None:
    """Make the replicas' directories: Slurm would not, and their jobs would fail without a log."""
    directories = [submission.directory(rank) for rank in submission.ranks]
    command = ["sh", "-c", _PREPARE, "sh", *directories]
    try:
        done = run(command, secret_assignments(submission.secrets))
    except CommandError as error:
        failure = _unreachable(error)
    else:
        if done.code == 0:
            return
        why = redacted(done.complaint, submission.secrets.values())
        failure = LaunchError(
            f"the directory {submission.base} cannot be written: {why}",
            fix="Set --backend-arg directory= to one on a disk that all nodes share.",
        )
    raise failure  # out of the handler: frames of the other error hold what was to be written


def _clear(run: Run, submission: Submission) -> None:
    """Remove the directories of a submission that was refused, and the secrets in them."""
    directories = [submission.directory(rank) for rank in submission.ranks]
    try:
        run(["sh", "-c", _CLEAR, "sh", submission.base, *directories], "")
    except CommandError as error:
        logger.error("%s could not be removed: %s", submission.base, error)


def _sbatch(run: Run, submission: Submission, sleep: Callable[[float], None]) -> str:
    """Submit; the id of the job array."""
    try:
        done = run(submission.argv, submission.script)
    except NoCommandError as error:
        raise cluster.no_slurm(error) from None
    except CommandError as error:
        return _found_again(run, submission, str(error), sleep)
    except BaseException:  # interrupted: it may be there, and nobody will know its id
        _withdraw(run, submission)
        raise
    if done.code == 0:
        return done.out.strip().split("\n")[-1].partition(";")[0]
    if _REPLY_LOST.search(done.err):
        return _found_again(run, submission, done.complaint, sleep)
    raise cluster.refusal(run, done)


def _found_again(run: Run, submission: Submission, why: str, sleep: Callable[[float], None]) -> str:
    """The id of a job whose submission was not answered, if it was taken."""
    answered = False
    for look in range(_LOOKS):
        if look:
            sleep(_PAUSE_S)
        try:
            found = _tasks(run, submission)
        except CommandError:
            continue
        answered = True
        for array, _ in found:
            logger.warning("sbatch: %s; the job is there all the same", why)
            return array
    if not answered:
        raise _UnansweredError(
            f"Slurm did not answer, and may have taken the job: {why}",
            fix="When it is back, `diloco-cloud cancel` finds what is there.",
        )
    raise LaunchError(f"Slurm did not take the job: {why}", fix="Try again when it is back.")


def _tasks(run: Run, submission: Submission) -> list[Task]:
    """Tasks of a submission that are in the queue.

    Other ranks of the same attempt may be there, too, started by somebody else.
    """
    jobs = ask(run, "--me", f"--name={submission.job_name}")
    wanted = set(submission.ranks)
    return [
        (array, task)
        for (array, task), job in jobs.items()
        if task in wanted and (job.name, job.comment) == (submission.job_name, submission.token)
    ]


def _withdraw(run: Run, submission: Submission) -> None:
    """Cancel what a submission may have come to."""
    try:
        for array, task in _tasks(run, submission):
            cancel(run, SlurmReplica.submitted(submission, array, task))
    except (CommandError, LaunchError) as error:
        logger.error("%s may be in the queue: %s", submission.job_name, error)


def cancel(run: Run, replica: SlurmReplica) -> None:
    """Ask Slurm to end a replica.

    Raises:
        LaunchError: Slurm cannot be asked to.
    """
    script = 'cd "$1" 2>/dev/null && touch cancel && rm -f secrets; true'
    try:
        # The wish is on the disk first: whatever comes of it is then not taken for a preemption.
        run(["sh", "-c", script, "sh", replica.directory], "")
        done = run(["scancel", "--quiet", replica.task_id], "")
    except CommandError as error:
        raise _unreachable(error) from None
    if done.code != 0 and "Unable to contact" in done.err:
        raise _unreachable(CommandError(done.complaint))


def recorded(run: Run, base: str, name: str) -> list[SlurmReplica]:
    """Replicas of a run that Slurm knows, or that have left a record on the disk.

    Raises:
        LaunchError: one of the two cannot be asked.
    """
    try:
        jobs = ask(run, "--me")
        listing = run(["sh", "-c", _LIST, "sh", base], "")
    except CommandError as error:
        raise _unreachable(error) from None
    found: dict[Task, SlurmReplica] = {}
    for match in map(_DIRECTORY.fullmatch, listing.out.splitlines()):
        if match is not None:
            rank, attempt, token, array = match.groups()
            directory = f"{base}/{rank}.{attempt}-{token}"
            replica = SlurmReplica(array, int(rank), job_name_of(name, int(attempt)), directory)
            found[array, int(rank)] = replica
    for (array, task), job in jobs.items():
        attempt = job.name.removeprefix(f"{name}.a")
        if attempt.isdigit() and job.name == job_name_of(name, int(attempt)):
            directory = f"{base}/{task}.{attempt}-{job.comment}"
            found[array, task] = SlurmReplica(array, task, job.name, directory)
    return sorted(found.values(), key=lambda replica: (int(replica.job), replica.task))


def _unreachable(error: CommandError) -> LaunchError:
    return LaunchError(f"Slurm cannot be asked: {error}", fix="Try again when it is back.")
