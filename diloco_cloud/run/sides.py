"""Starts a run's replicas on several backends: on all of them, or on none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from diloco_cloud.errors import DilocoError
from diloco_cloud.executor import ReplicaHandle
from diloco_cloud.run.executors import Executors
from diloco_cloud.run.intents import Start, kept_fresh
from diloco_cloud.run.record import RunRecord
from diloco_cloud.run.spec import RunSpec
from diloco_cloud.run.start import roll_back, start_replicas
from diloco_cloud.store.base import ObjectStore


def start_sides(
    store: ObjectStore,
    record: RunRecord,
    executors: Executors,
    starts: Sequence[Start],
    *,
    clock: Callable[[], float] = time.time,
) -> None:
    """Start replicas that were announced, backend by backend.

    One backend after the other, so that nothing is paid for on the second while the first may still
    refuse: a launch takes seconds, and replicas wait for each other for minutes.

    Args:
        store: the run's own prefix.
        record: what its ``run.json`` says.
        executors: of the run.
        starts: at most one for each backend.
        clock: seconds since the epoch.

    Raises:
        LaunchError: a backend failed; what had been started, on any of them, was cancelled.
    """
    started: list[list[ReplicaHandle]] = []
    try:
        for index, start in enumerate(starts):
            executor = executors.get(start.backend)
            with naming(start.backend, record.spec), contextlib.ExitStack() as later:
                for other in starts[index + 1 :]:  # an image may take minutes to be built
                    later.enter_context(kept_fresh(store, other, at=clock()))
                handles = start_replicas(store, record, executor, start, clock=clock)
            started.append(handles)
    except BaseException as error:  # Ctrl-C too must not leave billed replicas behind
        failed = len(started)  # which has rolled itself back
        for start, handles in zip(starts, started, strict=False):
            roll_back(store, executors.get(start.backend), handles, start, error, at=clock())
        for start in starts[failed + 1 :]:
            roll_back(store, executors.get(start.backend), [], start, error, at=clock())
        if started and isinstance(error, DilocoError):
            places = " and ".join(start.backend for start in starts[:failed])
            undone = f"What had been started on {places} was cancelled."
            error.fix = f"{error.fix} {undone}" if error.fix else undone
        raise


@contextlib.contextmanager
def naming(backend: str, spec: RunSpec) -> Iterator[None]:
    """Let errors tell which backend they are about, where a run has several."""
    try:
        yield
    except DilocoError as error:
        if len(spec.ranks_by_backend) > 1 and backend not in error.message:
            error.message = f"{backend}: {error.message}"
        raise
