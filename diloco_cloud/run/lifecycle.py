"""Cancel, resume and delete a run, from any machine that reaches its store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from diloco_cloud import keys
from diloco_cloud.errors import DilocoError, UsageError
from diloco_cloud.executor import TERMINAL_STATES, ReplicaHandle, ServerlessExecutor
from diloco_cloud.run.observe import Observer
from diloco_cloud.run.preflight import check_environment, check_trainer
from diloco_cloud.run.record import RunRecord, create_json, list_lives, read_json, to_handle
from diloco_cloud.run.spec import RunSpec
from diloco_cloud.run.start import start_replicas
from diloco_cloud.run.status import ReplicaView, RunStatus
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)


def check_ranks(spec: RunSpec, ranks: Sequence[int] | None) -> list[int]:
    """``ranks`` without repetition, in order; all where None.

    Raises:
        UsageError: a rank that the run does not have.
    """
    chosen = range(spec.replicas) if ranks is None else sorted(set(ranks))
    for rank in chosen:
        if not 0 <= rank < spec.replicas:
            raise UsageError(
                f"{spec.run_id} has no replica {rank}",
                fix=f"It has replicas 0 to {spec.replicas - 1}.",
            )
    return list(chosen)


def cancel(
    store: ObjectStore,
    spec: RunSpec,
    observer: Observer,
    executor: Callable[[], ServerlessExecutor],
    ranks: Sequence[int] | None,
    *,
    clock: Callable[[], float] = time.time,
) -> list[int]:
    """Ask replicas to stop; see :meth:`diloco_cloud.Run.cancel`."""
    chosen = check_ranks(spec, ranks)
    views = observer.observe().replicas
    going = [rank for rank in chosen if views[rank].state not in TERMINAL_STATES]
    # Recorded for all before any is asked: whatever interrupts this, the wish is known, and a
    # replica that dies of it counts as cancelled.
    for rank in going:
        request = {"rank": rank, "attempt": views[rank].attempt, "requested_at": clock()}
        create_json(store, keys.cancel(rank, views[rank].attempt), request)
    handles = observer.handles()
    for rank in going:
        _, handle = handles[rank]
        if handle is not None:
            executor().cancel(handle)
    return going


def resume(
    store: ObjectStore,
    record: RunRecord,
    observer: Observer,
    executor: ServerlessExecutor,
    ranks: Sequence[int] | None,
    *,
    clock: Callable[[], float] = time.time,
) -> list[int]:
    """Start replicas again that have ended; see :meth:`diloco_cloud.Run.resume`."""
    spec = record.spec
    status = observer.observe()
    views = [status.replicas[rank] for rank in check_ranks(spec, ranks)]
    if ranks is None:
        _refuse_all(status)
        chosen = [view for view in views if view.state not in ("running", "succeeded")]
        chosen = [view for view in chosen if view.state != "unknown"]
    else:
        for view in views:
            _refuse_one(spec, view)
        chosen = views
    check_trainer(spec.trainer, spec.trainer_args, record.directory)
    check_environment(spec)
    starting = [view.rank for view in chosen]
    attempt = max(view.attempt for view in chosen) + 1
    for rank in starting:
        intent = {"rank": rank, "attempt": attempt, "requested_at": clock()}
        if not create_json(store, keys.intent(rank, attempt), intent):
            raise UsageError(
                f"replica {rank} of {spec.run_id} is being resumed by someone else",
                fix="Look again with `diloco-cloud status`.",
            )
    start_replicas(store, record, executor, starting, attempt=attempt, clock=clock)
    return starting


def refuse_unless(cancelling: bool, status: RunStatus) -> None:
    """Raise ``UsageError`` for a run that is still going and may not be cancelled."""
    if not cancelling:
        raise UsageError(
            f"{status.run_id} is {status.state}", fix="Cancel it first, or let `down` do so."
        )


def require_ended(status: RunStatus) -> None:
    """Raise ``DilocoError`` for a run that has not ended."""
    if not status.is_terminal:
        going = [view.rank for view in status.replicas if view.state not in TERMINAL_STATES]
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


def every_handle(store: ObjectStore) -> list[ReplicaHandle]:
    """The handles of all attempts that the run whose prefix is ``store`` has made."""
    made = [life for life, kinds in list_lives(store).items() if "handle" in kinds]
    found = (read_json(store, keys.handle(*life)) for life in made)
    return [to_handle(values) for values in found if values is not None]


def forget(handles: Sequence[ReplicaHandle], executor: Callable[[], ServerlessExecutor]) -> None:
    """Let the executor delete what it has kept of replicas; never raises.

    Not part of the contract: a provider's records are not ours to delete, a local process's are.
    """
    try:
        delete_records = getattr(executor(), "forget", None)
        if delete_records is not None:
            for handle in handles:
                delete_records(handle)
    except Exception as error:  # the run itself is gone, which is what was asked for
        logger.warning("the replicas' own records are still there: %s", error)


def _refuse_all(status: RunStatus) -> None:
    states = {view.state for view in status.replicas}
    if states == {"succeeded"}:
        raise UsageError(
            f"{status.run_id} has succeeded; there is nothing to resume",
            fix="Launch a new run to train further.",
        )
    if not states & {"failed", "cancelled", "pending"}:
        raise UsageError(
            f"{status.run_id} is {status.state}; no replica of it has ended early",
            fix="Cancel what should start again, or name ranks with --replica.",
        )


def _refuse_one(spec: RunSpec, view: ReplicaView) -> None:
    if view.state in ("running", "succeeded"):
        raise UsageError(
            f"replica {view.rank} of {spec.run_id} is {view.state}",
            fix="Only replicas that have ended early are resumed.",
        )
