"""Follows a run and keeps its replicas alive.

A supervisor is a reader of the run's prefix like any other, on any machine. It holds nothing that
another one could not read again: a start is announced by an object that only one can create, so any
number of supervisors start a life once, and one that is killed at any instant leaves at most an
announcement that grows old, after which the next attempt is somebody else's to make.

The replicas need no supervisor to get to the end of the run; only the dead ones do.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator

from diloco_cloud import keys
from diloco_cloud.errors import (
    ExpiredCredentialsError,
    StoreError,
    ThrottledError,
    UnreachableError,
    UsageError,
)
from diloco_cloud.run.executors import Executors
from diloco_cloud.run.hang import HangWatch
from diloco_cloud.run.lifecycle import release
from diloco_cloud.run.observe import Observer
from diloco_cloud.run.preflight import check_environment
from diloco_cloud.run.record import RunRecord
from diloco_cloud.run.reducers import Reducers
from diloco_cloud.run.restart import UNSUPERVISED_S
from diloco_cloud.run.restarter import Event, Restarter
from diloco_cloud.run.start import import_path
from diloco_cloud.run.status import ReplicaView, RunStatus
from diloco_cloud.store.base import ObjectStore

#: Seconds between two looks at a run.
INTERVAL_S = 3.0
#: Seconds between two signs that the run is supervised.
_SIGN_S = UNSUPERVISED_S / 6


def ignore(_event: Event) -> None:
    """Takes an event, and tells nobody."""


class Supervisor:
    """Follows one run to its end, and starts again what its policy allows.

    Args:
        store: the run's own prefix.
        record: what its ``run.json`` says.
        observer: of the run.
        executors: of its replicas.
        max_restarts: in a row, of a replica that does not get into a round in between; default:
            the run's own. 0: nothing is started again.
        on_event: told what happens, in the thread that follows the run.
        clock: seconds since the epoch.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        store: ObjectStore,
        record: RunRecord,
        observer: Observer,
        executors: Executors,
        *,
        max_restarts: int | None = None,
        on_event: Callable[[Event], None] = ignore,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._record = record
        self._observer = observer
        self._executors = executors
        self._max = record.spec.max_restarts if max_restarts is None else max_restarts
        self._on_event = on_event
        self._clock = clock
        self._sleep = sleep
        self._restarter = Restarter(
            store,
            record,
            observer,
            executors,
            max_restarts=self._max,
            on_event=on_event,
            clock=clock,
        )
        self._reducers = Reducers(
            store, record, executors, max_restarts=self._max, on_event=on_event, clock=clock
        )
        self._hangs = HangWatch(
            store,
            observer,
            executors,
            timeout_s=record.spec.hang_timeout,
            on_event=on_event,
            clock=clock,
        )
        self._missing: set[str] = set()
        self._sign = keys.supervisor(os.urandom(4).hex())
        self._signed_at: float | None = None

    def run(self, interval: float = INTERVAL_S) -> RunStatus:
        """Supervise to the run's end; returns its last status; see :meth:`watch`."""
        return deque(self.watch(interval), maxlen=1).pop()

    def watch(self, interval: float = INTERVAL_S) -> Iterator[RunStatus]:
        """Supervise, telling the status after each look; the last one is the run's end.

        Args:
            interval: seconds between two looks.

        Raises:
            UsageError: replicas cannot be started from this machine.
            RunNotFoundError: the run was deleted.
        """
        try:
            with import_path(self._record.directory):  # once, for starts in several threads
                yield from self._follow(interval)
        finally:
            self._sign_off()
        if self._max > 0:
            yield self._observer.observe()  # as it is without a supervisor

    def look(self, status: RunStatus) -> bool:
        """Act on a status, once; whether something is left to be started again.

        Args:
            status: the newest that the run's observer gave.

        Raises:
            UsageError: replicas cannot be started from this machine.
        """
        if self._max == 0:
            return False
        missing = self._missing_backends(status)
        self._give_sign()
        self._reducers.look(status)
        self._hangs.look(status, without=missing)
        return self._restarter.look(status, without=missing)

    def _follow(self, interval: float) -> Iterator[RunStatus]:
        while True:
            try:
                status = self._observer.observe()
                more = self.look(status)
            except (UnreachableError, ThrottledError, ExpiredCredentialsError) as error:
                text = f"the store cannot be reached: {error.message}"
                self._on_event(Event(kind="trouble", time=self._clock(), text=text))
                self._sleep(interval)
                continue
            yield status
            # A replica that can't be asked may come back, so it has not ended. What another
            # supervisor would start again, and this one won't, has.
            ended = all(view.ended or view.retired for view in status.replicas)
            if not more and (status.is_terminal or ended):
                release(self._observer, self._executors)
                self._reducers.end()
                return
            self._sleep(interval)

    def _missing_backends(self, status: RunStatus) -> set[str]:
        """Backends of the run's replicas on which none can be started from here.

        Raises:
            UsageError: there is one at the first look: better found out at once than at the first
                death. Later, when a replica has moved there, the others are still looked after.
        """
        missing = set()
        for backend in {self._place(view) for view in status.replicas if _may_need_a_start(view)}:
            try:
                self._executors.get(backend)
                check_environment(self._record.spec, backend)
            except UsageError as error:
                if self._signed_at is None:
                    raise
                missing.add(backend)
                if backend not in self._missing:
                    text = f"replicas on {backend} cannot be started from here: {error.message}"
                    self._on_event(Event(kind="trouble", time=self._clock(), text=text))
        self._missing = missing
        return missing

    def _place(self, view: ReplicaView) -> str:
        return view.backend or self._record.spec.backend_of(view.rank)

    def _give_sign(self) -> None:
        now = self._clock()
        if self._signed_at is None or now - self._signed_at >= _SIGN_S:
            self._store.put(self._sign, b"{}")
            self._signed_at = now

    def _sign_off(self) -> None:
        if self._signed_at is not None:
            with contextlib.suppress(StoreError):
                self._store.delete(self._sign)


def _may_need_a_start(view: ReplicaView) -> bool:
    return not view.retired and (view.restartable or not view.ended)
