"""Start replicas of a run again, as many as before or not, where they were or elsewhere."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from diloco_cloud.errors import UsageError
from diloco_cloud.executor_registry import require_backend
from diloco_cloud.run.by_backend import check_counts
from diloco_cloud.run.executors import Executors
from diloco_cloud.run.intents import Start, announce
from diloco_cloud.run.lifecycle import check_ranks
from diloco_cloud.run.observe import Observer
from diloco_cloud.run.placing import place
from diloco_cloud.run.preflight import check_environment, check_meeting_place, check_trainer
from diloco_cloud.run.record import RunRecord, change_size
from diloco_cloud.run.restart import ABANDONED_S
from diloco_cloud.run.sides import naming, start_sides
from diloco_cloud.run.start import import_path, start_request
from diloco_cloud.run.status import ReplicaView, RunStatus
from diloco_cloud.run.views import why_ended
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)


def resume(
    store: ObjectStore,
    record: RunRecord,
    observer: Observer,
    executors: Executors,
    ranks: Sequence[int] | None = None,
    *,
    store_uri: str,
    replicas: int | Mapping[str, int] | None = None,
    backend: str | None = None,
    clock: Callable[[], float] = time.time,
) -> list[int]:
    """Start replicas again that have ended, or new ones; see :meth:`diloco_cloud.Run.resume`.

    Nothing is written before every backend has been asked whether it can do its part. Then all of
    it is done, or none.
    """
    status = observer.observe()
    _refuse_finished(status)
    fleet = None
    if isinstance(replicas, Mapping):
        fleet = _checked_fleet(replicas, backend)
        replicas = sum(fleet.values())
    size = status.size if replicas is None else _new_size(status, ranks, replicas)
    if ranks is not None:
        chosen = _named(status, ranks)
    else:
        chosen = _startable(status, size)
        if not chosen and size == status.size:
            _refuse(status)
    groups = _by_backend(status.replicas[:size], chosen, backend, fleet)
    starts = [_start(observer, name, views, size) for name, views in groups.items()]
    _check(store, record, executors, starts, _places(status.replicas, groups), store_uri)
    number = observer.lives.size_number
    if size != status.size:
        places = {rank: start.backend for start in starts for rank in start.ranks}
        change_size(store, number + 1, size, places, at=clock())
    try:
        mine = _announce(store, starts, clock)
        ours = {rank for start in mine for rank in start.ranks}
        _stop_unheard(observer, executors, [view for view in chosen if view.rank in ours])
        started = start_sides(store, record, executors, mine, clock=clock)
    except BaseException:
        if size != status.size:
            _change_back(store, number + 2, status.size, clock)
        raise
    _tell_who_is_left_out(status.run_id, [v.rank for v in chosen if v.rank not in ours], ours)
    return started


def _start(observer: Observer, backend: str, views: Sequence[ReplicaView], size: int) -> Start:
    """How replicas are started together on one backend."""
    return Start(
        ranks=[view.rank for view in views],
        attempt=max(observer.next_attempt(view) for view in views),
        backend=backend,
        world_size=size,
        by="resume",
        after={view.rank: why_ended(view) for view in views if view.ended},
    )


def _places(views: Sequence[ReplicaView], groups: Mapping[str, Sequence[ReplicaView]]) -> list[str]:
    """The backends that replicas will be on."""
    starting = {view.rank for group in groups.values() for view in group}
    stay = [v for v in views if v.launched and not v.ended and v.rank not in starting]
    return list(dict.fromkeys((*(view.backend for view in stay if view.backend), *groups)))


def _check(
    store: ObjectStore,
    record: RunRecord,
    executors: Executors,
    starts: Sequence[Start],
    places: Sequence[str],
    store_uri: str,
) -> None:
    """Find out on every backend what can be known to fail.

    Raises:
        UsageError: one of the starts cannot work.
    """
    several = len(starts) > 1
    for start in starts:
        with naming(start.backend, several=several):
            check_environment(record.spec, start.backend, executors.get(start.backend))
    if starts:
        check_meeting_place(places, store_uri)
        _check_trainer(record, [start.backend for start in starts])
    with import_path(record.directory):
        for start in starts:
            with naming(start.backend, several=several):
                start_request(record, store.uri, start).check(executors.get(start.backend))


def _announce(
    store: ObjectStore, starts: Sequence[Start], clock: Callable[[], float]
) -> list[Start]:
    """Announce all, before any is started; those of whose ranks some are ours to start."""
    ours = [
        dataclasses.replace(start, ranks=announce(store, start, at=clock())) for start in starts
    ]
    return [start for start in ours if start.ranks]


def _change_back(store: ObjectStore, number: int, size: int, clock: Callable[[], float]) -> None:
    """Give a run whose new replicas could not be started its old size again; never raises."""
    try:
        change_size(store, number, size, {}, at=clock())
    except Exception as error:
        logger.warning("the run's number of replicas could not be changed back: %s", error)


def _tell_who_is_left_out(run_id: str, theirs: Sequence[int], ours: Collection[int]) -> None:
    """Say which replicas somebody else is starting.

    Raises:
        UsageError: all of them.
    """
    if theirs and not ours:
        raise UsageError(
            f"{run_id} is being resumed by someone else",
            fix="Look again with `diloco-cloud status`.",
        )
    if theirs:
        logger.warning("replicas %s are being started by someone else, and were left alone", theirs)


def _checked_fleet(replicas: Mapping[str, int], backend: str | None) -> dict[str, int]:
    """How many replicas the run is to have on each backend."""
    if backend is not None:
        raise UsageError(
            "the replicas of each backend are given, and one backend for all",
            fix="Leave one of them out.",
        )
    for name in replicas:
        require_backend(name)
    return check_counts(replicas)


def _new_size(status: RunStatus, ranks: Sequence[int] | None, replicas: int) -> int:
    """The number of replicas that the run is to have."""
    if ranks is not None:
        raise UsageError(
            "replicas are named, and their number is given",
            fix="Use --replica to start some again, or --replicas to change how many there are.",
        )
    if replicas < 1:
        raise UsageError(f"replicas is {replicas}", fix="It must be at least 1.")
    going = [view.rank for view in status.replicas[replicas:] if _goes_on(view)]
    if going:
        options = " ".join(f"--replica {rank}" for rank in going)
        raise UsageError(
            f"replicas {going} of {status.run_id} would not belong to it, and have not ended",
            fix=f"diloco-cloud cancel {status.run_id} {options}",
        )
    return replicas


def _goes_on(view: ReplicaView) -> bool:
    return view.state == "running" or (view.state == "pending" and view.launched)


def _startable(status: RunStatus, size: int) -> list[ReplicaView]:
    """Those of the first ``size`` replicas that do not run, and have not done their work."""
    known = [view for view in status.replicas[:size] if _has_ended_early(view)]
    return known + [
        ReplicaView(rank=rank, attempt=0, state="pending", backend=status.backend)
        for rank in range(len(status.replicas), size)
    ]


def _named(status: RunStatus, ranks: Sequence[int]) -> list[ReplicaView]:
    views = [status.replicas[r] for r in check_ranks(status.run_id, len(status.replicas), ranks)]
    for view in views:
        if view.retired:
            raise UsageError(
                f"replica {view.rank} has retired: {status.run_id} has {status.size} replicas",
                fix=f"Use --replicas {view.rank + 1} to have more.",
            )
        # Whoever names one that nobody can ask knows more than the store does.
        if not _has_ended_early(view) and view.state != "unknown":
            state = "being started" if view.state == "pending" else view.state
            raise UsageError(
                f"replica {view.rank} of {status.run_id} is {state}",
                fix="Only replicas that have ended early are resumed.",
            )
    return views


def _has_ended_early(view: ReplicaView) -> bool:
    if view.state == "pending":  # unless it queues at its provider, or somebody is at it
        at_it = (view.starting_s or 0.0) <= ABANDONED_S
        return not view.launched and not at_it
    return view.state in ("failed", "cancelled")


def _by_backend(
    all_views: Sequence[ReplicaView],
    chosen: Sequence[ReplicaView],
    backend: str | None,
    fleet: Mapping[str, int] | None,
) -> dict[str, list[ReplicaView]]:
    """Each replica goes where it was, unless another backend, or a fleet, is asked for."""
    places: dict[int, str] = {}
    if fleet is not None:
        starting = {view.rank for view in chosen}
        others = [view for view in all_views if view.rank not in starting]
        places = place(fleet, others, chosen)
    groups: dict[str, list[ReplicaView]] = {}
    for view in chosen:
        groups.setdefault(places.get(view.rank) or backend or view.backend or "", []).append(view)
    return groups


def _stop_unheard(observer: Observer, executors: Executors, views: Sequence[ReplicaView]) -> None:
    """Ask lives that nobody could be asked about to end: their successors are about to start."""
    for view in views:
        launched = observer.launched(view.rank, view.attempt) if view.state == "unknown" else None
        if launched is not None:
            try:
                executors.get(launched.backend).cancel(launched.handle)
            except Exception as error:  # it may well be gone; what it still does counts nowhere
                logger.warning("attempt %d of replica %d: %s", view.attempt, view.rank, error)


def _check_trainer(record: RunRecord, backends: Sequence[str]) -> None:
    """Look for the trainer where local replicas will, or where it was when the run was launched."""
    here = os.path.isdir(record.directory)
    if here or "local" in backends:
        directory = record.directory if here else os.getcwd()
        check_trainer(record.spec.trainer, record.spec.trainer_args, directory)


def _refuse_finished(status: RunStatus) -> None:
    if status.over or {view.state for view in status.replicas[: status.size]} == {"succeeded"}:
        raise UsageError(
            f"{status.run_id} has succeeded; there is nothing to resume",
            fix="Launch a new run to train further.",
        )


def _refuse(status: RunStatus) -> None:
    raise UsageError(
        f"{status.run_id} is {status.state}; no replica of it has ended early",
        fix="Cancel what should start again, or name ranks with --replica.",
    )
