"""Starts a run's replicas on several backends: on all of them, or on none."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

from diloco_cloud import keys
from diloco_cloud.errors import DilocoError
from diloco_cloud.run.executors import Executors
from diloco_cloud.run.intents import Start, kept_fresh
from diloco_cloud.run.lives import read_lives
from diloco_cloud.run.record import RunRecord, create_json
from diloco_cloud.run.rollback import Begun, give_back, undo
from diloco_cloud.run.start import begin, start_request
from diloco_cloud.store.base import ObjectStore


def start_sides(
    store: ObjectStore,
    record: RunRecord,
    executors: Executors,
    starts: Sequence[Start],
    *,
    clock: Callable[[], float] = time.time,
) -> list[int]:
    """Start replicas that were announced, backend by backend; returns the ranks, in order.

    One backend after the other, so that nothing is paid for on the second while the first may still
    refuse: a launch takes seconds, and replicas wait for each other for minutes. What a user
    cancels before its turn has come is not started.

    Args:
        store: the run's own prefix.
        record: what its ``run.json`` says.
        executors: of the run.
        starts: at most one for each backend.
        clock: seconds since the epoch.

    Raises:
        LaunchError: a backend failed; what had been started, on any of them, was cancelled, or is
            named by the error.
    """
    sides = [Begun(start, executors.get(start.backend)) for start in starts]
    begun: list[Begun] = []
    several = len(starts) > 1
    try:
        for index, side in enumerate(sides):
            begun.append(side)
            with naming(side.start.backend, several=several), contextlib.ExitStack() as later:
                for other in starts[index + 1 :]:  # an image may take minutes to be built
                    later.enter_context(kept_fresh(store, other, at=clock()))
                wanted = _still_wanted(store, side.start)
                if wanted.ranks:
                    request = start_request(record, store.uri, wanted)
                    begin(store, record, side, request, clock=clock)
    except BaseException as error:  # Ctrl-C too must not leave billed replicas behind
        undone = undo(store, sides, error, at=clock())
        for side in undone:
            if side in begun:
                give_back(record.name, side)
        raise
    return sorted(handle.rank for side in sides for handle in side.handles)


def _still_wanted(store: ObjectStore, start: Start) -> Start:
    """A start without the ranks that a user has cancelled since it was announced."""
    lives = read_lives(store)
    unwanted = {rank for rank in start.ranks if "cancel" in lives.of(rank, start.attempt)}
    for rank in unwanted:
        outcome = {"rank": rank, "attempt": start.attempt, "state": "cancelled"}
        create_json(store, keys.outcome(rank, start.attempt), outcome)
    return dataclasses.replace(start, ranks=[rank for rank in start.ranks if rank not in unwanted])


@contextlib.contextmanager
def naming(backend: str, *, several: bool) -> Iterator[None]:
    """Let errors tell which backend they are about, where a run has several."""
    try:
        yield
    except DilocoError as error:
        if several and error.backend is None:
            error.backend = backend
            error.message = f"{backend}: {error.message}"
        raise
