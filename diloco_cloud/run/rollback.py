"""Undoes starts of replicas that failed, on all backends that had any of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco_cloud import keys
from diloco_cloud.errors import DilocoError, LaunchError, UsageError
from diloco_cloud.executor import ForgetsReplicas, ReleasesRun, ReplicaHandle, ServerlessExecutor
from diloco_cloud.run.intents import Start
from diloco_cloud.run.record import command_line, create_json
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Begun:
    """A start that is under way.

    Attributes:
        start: which replicas, whose intents are written.
        executor: of its backend.
        handles: of those that the provider has started so far; they are added as they come, so that
            whatever interrupts the start, whoever undoes it knows them.
    """

    start: Start
    executor: ServerlessExecutor
    handles: list[ReplicaHandle] = field(default_factory=list)


def failed_on(backend: str) -> str:
    """What the error of a launch begins with whose cause is not one of ours."""
    return f"backend {backend!r} failed to start the replicas: "


def undo(
    store: ObjectStore,
    begun: Sequence[Begun],
    cause: BaseException,
    *,
    at: float,
) -> list[Begun]:
    """Roll back starts that failed together; never raises.

    An error of ours is told what became of them.

    Args:
        store: the run's own prefix.
        begun: what was, or was to be, started.
        cause: why it is undone.
        at: seconds since the epoch.

    Returns:
        Those of which nothing is left.
    """
    undone, done, left = [], [], []
    for one in begun:
        going = _roll_back(store, one, cause, at=at)
        if going:
            left.append(f"replicas {going} on {one.start.backend}")
            continue
        undone.append(one)
        if one.handles:
            done.append(one.start.backend)
    said = [f"What had been started on {' and '.join(done)} was cancelled."] if done else []
    if left:
        still = f"{' and '.join(left)} could not be cancelled, and may go on"
        said.append(f"{still[0].upper()}{still[1:]}: `{command_line('cancel', store)}`.")
    if isinstance(cause, DilocoError):
        cause.fix = " ".join(filter(None, (cause.fix, *said))) or None
    elif left:  # Ctrl-C, which no one shows
        logger.error(said[-1])
    return undone


def _roll_back(store: ObjectStore, one: Begun, cause: BaseException, *, at: float) -> list[int]:
    """Cancel what was started and say in the prefix what happened; never raises.

    Returns the ranks that could not be cancelled. They have not ended, so they get no outcome:
    their handles are what `cancel` and `down` find them by.
    """
    going = [handle.rank for handle in one.handles if not _cancel(one.executor, handle)]
    for rank in one.start.ranks:
        if rank not in going:
            try:
                key = keys.outcome(rank, one.start.attempt)
                create_json(store, key, _outcome(rank, one.start, cause, at))
            except Exception:
                logger.exception("could not record the failed launch of replica %d", rank)
    return going


def _cancel(executor: ServerlessExecutor, handle: ReplicaHandle) -> bool:
    try:
        executor.cancel(handle)
    except Exception:
        logger.exception("could not cancel replica %d after a failed launch", handle.rank)
        return False
    return True


def _outcome(rank: int, start: Start, cause: BaseException, at: float) -> dict[str, object]:
    message = getattr(cause, "message", None) or str(cause) or type(cause).__name__
    message = message.removeprefix(failed_on(start.backend))
    # What a supervisor's machine lacks, another one may have.
    wrong = isinstance(cause, UsageError) and start.by != "supervisor"
    return {
        "rank": rank,
        "attempt": start.attempt,
        "state": "failed",
        "exit_code": None,
        "reason": "no_capacity" if _is_providers(cause) else None,
        "restartable": not wrong,
        "error": f"the launch failed: {message}",
        "traceback": None,
        "result": None,
        "digest": None,
        "ended_at": at,
    }


def _is_providers(cause: BaseException) -> bool:
    """Whether a launch failed on the provider's side."""
    if isinstance(cause, DilocoError):
        return isinstance(cause, LaunchError)
    return isinstance(cause, Exception)


def give_back(name: str, one: Begun) -> None:
    """Let an executor delete what it keeps of a start that was undone; never raises.

    Args:
        name: what it knows the run's replicas as.
        one: whose replicas are all cancelled.
    """
    try:
        if isinstance(one.executor, ForgetsReplicas):
            for handle in one.handles:
                one.executor.forget(handle)
        if isinstance(one.executor, ReleasesRun):
            one.executor.release(name)
    except Exception as error:
        logger.warning("something of the failed launch is left on %s: %s", one.start.backend, error)
