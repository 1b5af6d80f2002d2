"""Cancel and delete a run, from any machine that reaches its store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from diloco_cloud import keys
from diloco_cloud.errors import DilocoError, LaunchError, UsageError
from diloco_cloud.executor import ForgetsReplicas, RecoversReplicas, ReleasesRun
from diloco_cloud.run.elsewhere import STOP_COMMANDS
from diloco_cloud.run.executors import Executors
from diloco_cloud.run.lives import read_lives
from diloco_cloud.run.observe import Observer
from diloco_cloud.run.record import Launched, RunRecord, create_json, read_json
from diloco_cloud.run.status import ReplicaView, RunStatus
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)


def check_ranks(run_id: str, n_ranks: int, ranks: Sequence[int] | None) -> list[int]:
    """``ranks`` without repetition, in order; all where None.

    Args:
        run_id: of the run.
        n_ranks: how many ranks it has, or had.
        ranks: those that were asked for.

    Raises:
        UsageError: a rank that the run does not have.
    """
    chosen = range(n_ranks) if ranks is None else sorted(set(ranks))
    for rank in chosen:
        if not 0 <= rank < n_ranks:
            raise UsageError(
                f"{run_id} has no replica {rank}", fix=f"It has replicas 0 to {n_ranks - 1}."
            )
    return list(chosen)


def cancel(
    store: ObjectStore,
    observer: Observer,
    executors: Executors,
    ranks: Sequence[int] | None,
    *,
    clock: Callable[[], float] = time.time,
) -> list[int]:
    """Ask replicas to stop; see :meth:`diloco_cloud.Run.cancel`."""
    status = observer.observe()
    chosen = check_ranks(status.run_id, len(status.replicas), ranks)
    views = [status.replicas[rank] for rank in chosen]

    def wish(rank: int, attempt: int) -> None:
        request = {"rank": rank, "attempt": attempt, "requested_at": clock()}
        create_json(store, keys.cancel(rank, attempt), request)

    # Recorded for all before any is asked: whatever interrupts this, the wish is known, and a
    # replica that dies of it counts as cancelled. One that is dead is not to be started again.
    concerned = [view for view in views if not view.ended or view.restartable]
    for view in concerned:
        wish(view.rank, view.attempt)
    handles = observer.handles()
    failures: list[DilocoError] = []
    for view in concerned:
        attempt, launched = handles[view.rank]
        if attempt > view.attempt:  # started meanwhile
            wish(view.rank, attempt)
        if launched is not None and (attempt > view.attempt or not view.ended):
            try:
                executors.get(launched.backend).cancel(launched.handle)
            except (LaunchError, UsageError) as error:  # the others are to end all the same
                failures.append(error)
    unrecorded = [view for view in concerned if handles[view.rank][1] is None]
    failures += _cancel_unrecorded(observer.record, unrecorded, executors)
    if failures:
        raise failures[0]
    return [view.rank for view in concerned if _goes_on(view, handles[view.rank][0])]


def _cancel_unrecorded(
    record: RunRecord, views: Sequence[ReplicaView], executors: Executors
) -> list[DilocoError]:
    """End what a launcher started that died before it could write down the provider's id.

    Returns what could not be done, by backend: the others are looked at all the same.
    """
    failures: list[DilocoError] = []
    for backend in {view.backend for view in views if view.backend is not None}:
        if backend in STOP_COMMANDS:
            command = STOP_COMMANDS[backend].format(run_id=record.spec.run_id)
            logger.warning("what %s has started, it stops: %s", backend, command)
            continue
        ranks = {view.rank for view in views if view.backend == backend}
        try:
            executor = executors.get(backend)
            if isinstance(executor, RecoversReplicas):
                for handle in executor.recover(record.name):
                    if handle.rank in ranks:
                        executor.cancel(handle)
        except (LaunchError, UsageError) as error:
            failures.append(error)
    return failures


def _goes_on(view: ReplicaView, newest: int) -> bool:
    return not view.ended or newest > view.attempt


def refuse_unless(cancelling: bool, status: RunStatus) -> None:
    """Raise ``UsageError`` for a run that is still going and may not be cancelled."""
    if not cancelling:
        raise UsageError(
            f"{status.run_id} is {status.state}", fix="Cancel it first, or let `down` do so."
        )


def require_ended(status: RunStatus) -> None:
    """Raise ``DilocoError`` for a run that has not ended."""
    if not status.is_terminal:
        going = [view.rank for view in status.replicas if not view.ended]
        raise DilocoError(
            f"replicas {going} of {status.run_id} have not ended yet; nothing was deleted",
            fix="Repeat `down` when `status` shows that they have.",
        )


def delete(store: ObjectStore) -> int:
    """Delete a run's prefix; returns the number of objects.

    ``run.json`` goes last, so that an interrupted deletion can be found and repeated.
    """
    found = [info.key for info in store.list("")]
    store.delete_many(key for key in found if key != keys.RUN)
    store.delete(keys.RUN)
    return len(found)


def every_launch(store: ObjectStore) -> list[Launched]:
    """All lives that the run whose prefix is ``store`` has had."""
    made = [life for life, kinds in read_lives(store).kinds.items() if "handle" in kinds]
    found = (read_json(store, keys.handle(*life)) for life in made)
    return [Launched.from_json(values) for values in found if values is not None]


def forget(lives: Sequence[Launched], executors: Executors) -> None:
    """Let executors delete what they have kept of replicas; never raises.

    Not part of the contract: a provider's records are not ours to delete, a local process's are.
    """
    for backend in {launched.backend for launched in lives}:
        try:
            executor = executors.get(backend)
            for launched in lives:
                if launched.backend == backend and isinstance(executor, ForgetsReplicas):
                    executor.forget(launched.handle)
        except Exception as error:  # the run itself is gone, which is what was asked for
            logger.warning("the replicas' own records on %s are still there: %s", backend, error)


def release(status: RunStatus, executors: Executors, record: RunRecord) -> None:
    """Let executors give back what they keep for a run that has ended."""
    used = (view.backend for view in status.replicas if view.backend is not None)
    for backend in {*record.spec.ranks_by_backend, *used}:
        executor, _ = executors.find(backend)
        if executor is not None and isinstance(executor, ReleasesRun):
            executor.release(record.name)
