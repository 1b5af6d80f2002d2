"""Ends replicas that live and stand still, so that they can be started again.

A deadlock, a kernel that never returns or a data loader that waits for ever stops the training
thread of a replica and nothing else of it: its heartbeat goes on, its provider sees a process that
runs, and the others wait for it in every round. Only the want of steps tells.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

from diloco_cloud import keys
from diloco_cloud.errors import LaunchError, UsageError
from diloco_cloud.run.durations import format_duration
from diloco_cloud.run.executors import Executors
from diloco_cloud.run.lives import Life
from diloco_cloud.run.observe import Observer
from diloco_cloud.run.record import Launched, create_json
from diloco_cloud.run.restarter import Event, EventKind
from diloco_cloud.run.status import ReplicaView, RunStatus
from diloco_cloud.store.base import ObjectStore

#: Seconds after which an executor is asked again to end a replica that has not ended.
ASK_AGAIN_S: Final = 60.0


def is_hung(view: ReplicaView, timeout_s: float) -> bool:
    """Whether a replica lives, and has stood still for ``timeout_s`` seconds while it trained.

    One that starts, joins, waits for others in a round, hands over or writes the result has no
    steps to make, and deadlines of its own.
    """
    standing = view.idle_s is not None and view.idle_s >= timeout_s
    return standing and view.alive and view.phase == "training" and not view.retired


class HangWatch:
    """Has the executors end replicas that stand still, which then count as failed: "hung".

    Whether they are started again is the restarter's to decide, as for any other death. Any number
    of these may watch one run: the note of it is created once, and to cancel twice is harmless.

    Args:
        store: the run's own prefix.
        observer: of the run.
        executors: of its replicas.
        timeout_s: without a step; None: nothing is watched.
        on_event: told what happens.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        store: ObjectStore,
        observer: Observer,
        executors: Executors,
        *,
        timeout_s: float | None,
        on_event: Callable[[Event], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._observer = observer
        self._executors = executors
        self._timeout_s = timeout_s
        self._on_event = on_event
        self._clock = clock
        self._asked: dict[Life, float] = {}

    def look(self, status: RunStatus, *, without: Collection[str] = ()) -> None:
        """Act on what a status shows.

        Args:
            status: the observer's newest.
            without: backends that cannot be used from this machine.
        """
        if self._timeout_s is None:
            return
        hung = [view for view in status.replicas if is_hung(view, self._timeout_s)]
        due = [view for view in hung if view.backend not in without and self._is_due(view)]
        handles = self._observer.handles() if due else {}
        for view in due:
            attempt, launched = handles[view.rank]
            if attempt == view.attempt:  # else it was started again meanwhile
                self._asked[view.rank, view.attempt] = self._clock()
                self._end(view, launched)

    def _is_due(self, view: ReplicaView) -> bool:
        asked_at = self._asked.get((view.rank, view.attempt))
        return asked_at is None or self._clock() - asked_at >= ASK_AGAIN_S

    def _end(self, view: ReplicaView, launched: Launched | None) -> None:
        standing = f"no step for {format_duration(view.idle_s or 0.0)}"
        what = f"replica {view.rank} lives and has made {standing}"
        if launched is None:
            self._tell("trouble", view, f"{what}; who launched it must end it")
            return
        # First: a supervisor that dies in between has not made it a cancelled one.
        note = {
            "rank": view.rank,
            "attempt": view.attempt,
            "reason": "hung",
            "error": standing,
            "noted_at": self._clock(),
        }
        if create_json(self._store, keys.hung(view.rank, view.attempt), note):
            self._tell("hung", view, f"{what}; it is ended")
        try:
            self._executors.get(launched.backend).cancel(launched.handle)
        except (LaunchError, UsageError) as error:
            self._tell("trouble", view, f"{what}, and cannot be ended from here: {error.message}")

    def _tell(self, kind: EventKind, view: ReplicaView, text: str) -> None:
        now = self._clock()
        self._on_event(Event(kind=kind, time=now, text=text, rank=view.rank, attempt=view.attempt))
