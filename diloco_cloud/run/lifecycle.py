"""Cancel and delete a run, from any machine that reaches its store."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from diloco_cloud import keys
from diloco_cloud.errors import DilocoError, LaunchError, UsageError
from diloco_cloud.executor import ForgetsReplicas, RecoversReplicas, ReleasesRun
from diloco_cloud.run.elsewhere import STOP_COMMANDS
from diloco_cloud.run.executors import Executors
from diloco_cloud.run.lives import read_lives
from diloco_cloud.run.observe import Observer
from diloco_cloud.run.record import Launched, command_line, create_json, read_json
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
    failures = _Failures()
    for view in concerned:
        attempt, launched = handles[view.rank]
        if attempt > view.attempt:  # started meanwhile
            wish(view.rank, attempt)
        if launched is not None and (attempt > view.attempt or not view.ended):
            with failures.noted(launched.backend, view.rank):
                executors.get(launched.backend).cancel(launched.handle)
    silent = {v.rank: v.backend for v in concerned if handles[v.rank][1] is None and v.backend}
    _cancel_unrecorded(store, observer, executors, chosen, silent, failures)
    failures.tell()
    return [view.rank for view in concerned if _goes_on(view, handles[view.rank][0])]


def cancel_unrecorded(store: ObjectStore, observer: Observer, executors: Executors) -> None:
    """End what launchers started that died before they could write down the provider's ids.

    Raises:
        DilocoError: a provider could not be asked.
    """
    failures = _Failures()
    ranks = range(observer.ranks(read_lives(store)))
    _cancel_unrecorded(store, observer, executors, ranks, {}, failures)
    failures.tell()


def _cancel_unrecorded(
    store: ObjectStore,
    observer: Observer,
    executors: Executors,
    ranks: Collection[int],
    silent: Mapping[int, str],
    failures: _Failures,
) -> None:
    """Ask the providers themselves for replicas of ``ranks`` that were announced and left no trace.

    Args:
        store: the run's own prefix.
        observer: of the run.
        executors: of its replicas.
        ranks: which ones.
        silent: by rank, where others are that have no handle, announced or not.
        failures: told what could not be done; all else is done all the same.
    """
    record = observer.record
    wanted: dict[str, set[int]] = {}
    for rank, backend in silent.items():
        wanted.setdefault(backend, set()).add(rank)
    announced: dict[str, dict[int, str]] = {}
    for (rank, attempt), kinds in read_lives(store).kinds.items():
        if rank in ranks and "intent" in kinds and not {"handle", "outcome"} & kinds.keys():
            intent = observer.intent(rank, attempt)
            backend = str(intent.get("backend", record.spec.backend))
            wanted.setdefault(backend, set()).add(rank)
            announced.setdefault(backend, {})[rank] = str(intent.get("host") or "another machine")
    for backend, theirs in wanted.items():
        if backend in STOP_COMMANDS:
            command = STOP_COMMANDS[backend].format(run_id=record.spec.run_id)
            logger.warning("what %s has started, it stops: %s", backend, command)
            continue
        with failures.noted(backend, *sorted(theirs)):
            executor = executors.get(backend)
            found = executor.recover(record.name) if isinstance(executor, RecoversReplicas) else []
            for handle in found:
                if handle.rank in theirs:
                    with failures.noted(backend, handle.rank):
                        executor.cancel(handle)
            ours = {h.rank for h in found}
            lost = {r: host for r, host in announced.get(backend, {}).items() if r not in ours}
            if lost:
                _tell_of_lost(store, record.name, backend, lost)


def _tell_of_lost(store: ObjectStore, name: str, backend: str, hosts: Mapping[int, str]) -> None:
    """Say that nothing is known of replicas that were about to be started.

    Args:
        store: the run's own prefix.
        name: what executors know the run's replicas as.
        backend: that they were to be on.
        hosts: by rank, from which machine.
    """
    logger.warning(
        "replicas %s were about to be started on %s from %s, and from here nothing is seen of "
        "them. If they were, they are called %s…, and `%s` there, or with the same region, account "
        "and settings, ends them.",
        *(sorted(hosts), backend, " and ".join(sorted(set(hosts.values())))),
        *(name, command_line("cancel", store)),
    )


class _Failures:
    """What could not be cancelled, of several replicas on several backends."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], tuple[DilocoError, list[int]]] = {}

    @contextlib.contextmanager
    def noted(self, backend: str, *ranks: int) -> Iterator[None]:
        """Go on after an error of the block, which concerns these ranks."""
        try:
            yield
        except (LaunchError, UsageError) as error:
            _, known = self._found.setdefault((backend, error.message), (error, []))
            known += [rank for rank in ranks if rank not in known]

    def tell(self) -> None:
        """Raise the first error, which then names them all."""
        if self._found:
            lines = [
                f"replicas {sorted(ranks)} on {backend} could not be cancelled: {message}"
                for (backend, message), (_, ranks) in self._found.items()
            ]
            error = next(iter(self._found.values()))[0]
            error.message = "; ".join(lines)
            raise error


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


def release(observer: Observer, executors: Executors) -> None:
    """Let executors give back what they keep for a run that has ended."""
    for backend in observer.backends_used():
        executor, _ = executors.find(backend)
        if executor is not None and isinstance(executor, ReleasesRun):
            executor.release(observer.record.name)
