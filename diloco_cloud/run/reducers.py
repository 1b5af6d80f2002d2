"""A run's volunteer reducers: jobs without a GPU, beside its replicas, that it can do without.

To executor and store they are the replicas of a run within the run: intents, handles, outcomes,
cancellations, signs of life and logs lie below ``reducers/`` as the replicas' do in the prefix, and
the same code reads and writes them. So none is started twice, none is lost sight of, and whoever
reads the prefix can stop them. What becomes of them never decides what becomes of the run.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from diloco_cloud import keys
from diloco_cloud.errors import DilocoError, LaunchError, UsageError
from diloco_cloud.executor import LaunchOptions, ServerlessExecutor
from diloco_cloud.run import lifecycle
from diloco_cloud.run.executors import Executors
from diloco_cloud.run.intents import Start, StartedBy, announce
from diloco_cloud.run.names import provider_name
from diloco_cloud.run.observe import Observer
from diloco_cloud.run.record import Launched, RunRecord, create_json
from diloco_cloud.run.restarter import Event, EventKind, Restart, Restarter
from diloco_cloud.run.spec import RunSpec
from diloco_cloud.run.start import LaunchRequest, start_replicas
from diloco_cloud.run.status import ReplicaView, RunStatus
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)

ENTRYPOINT = "diloco_cloud.reducer_entrypoint"
#: Seconds between two looks at whether reducers that were cancelled have ended.
_INTERVAL_S = 0.5


def reducers_name(name: str) -> str:
    """What executors know a run's reducers as: a name that no run can have, with its capital."""
    return f"{name}-R"


def reducers_request(
    spec: RunSpec,
    run_uri: str,
    *,
    backend: str | None = None,
    indices: Sequence[int] | None = None,
    attempt: int = 0,
    name: str | None = None,
) -> LaunchRequest:
    """What the executor of a backend is asked for, to start a run's reducers.

    Args:
        spec: of the run.
        run_uri: of its prefix.
        backend: default: the run's own.
        indices: which of them; default: all.
        attempt: which life of theirs this is.
        name: what it knows them as; without one, those of a run that could be launched now.
    """
    side = spec.on(backend or spec.backend)
    chosen = list(range(spec.reducers) if indices is None else indices)
    return LaunchRequest(
        n_replicas=len(chosen),
        entrypoint=ENTRYPOINT,
        entrypoint_args={"rendezvous_uri": run_uri, "spec_hash": spec.digest},
        gpu=None,
        timeout=spec.timeout,
        options=LaunchOptions(
            name=name or reducers_name(provider_name(spec.run_id, run_uri, 0.0)),
            ranks=chosen,
            world_size=spec.reducers,
            attempt=attempt,
            env=dict(side.env),
            secrets=side.secrets,
        ),
    )


class Reducers:
    """The reducers of one run; with none, nothing here does anything.

    Args:
        store: the run's prefix.
        record: what its ``run.json`` says.
        executors: of the run.
        max_restarts: in a row, of a reducer that serves no round in between; default: the run's.
        on_event: told what happens, in the thread that calls :meth:`look`.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        store: ObjectStore,
        record: RunRecord,
        executors: Executors,
        *,
        max_restarts: int | None = None,
        on_event: Callable[[Event], None] = lambda _event: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.count = record.spec.reducers
        self._run = record.spec
        self._run_uri = store.uri
        self._store = store.child(keys.REDUCERS)
        self._record = _as_a_run(record) if self.count else record
        self._executors = executors
        self._max = record.spec.max_restarts if max_restarts is None else max_restarts
        self._on_event = on_event
        self._clock = clock
        self._observer = Observer(self._store, self._record, executors, clock=clock)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._restarter = _Restarter(
            self._store,
            self._record,
            self._observer,
            executors,
            max_restarts=self._max,
            on_event=self._events.put,
            clock=clock,
        )
        self._restarter.request_of = self._request
        self._pool: ThreadPoolExecutor | None = None
        self._work: Future[None] | None = None
        self._founded = self._released = False

    # -- starting ------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start all; where the provider has no room for them, the run goes on without."""
        if self.count:
            self._found()
            self._start(range(self.count), 0, self._run.backend, "launch")

    def resume(self) -> None:
        """Start those again that have ended, now that replicas are started again."""
        if not self.count:
            return
        self._found()
        groups: dict[tuple[str, int], list[int]] = {}
        for view in self._observer.observe().replicas:
            if view.ended:
                place = (view.backend or self._run.backend, self._observer.next_attempt(view))
                groups.setdefault(place, []).append(view.rank)
        for (backend, attempt), indices in groups.items():
            self._start(indices, attempt, backend, "resume")

    def look(self, status: RunStatus) -> None:
        """Start again what has died, in the background: a replica's restart is not to wait for it.

        Args:
            status: the run's newest.
        """
        self._tell()
        idle = self._work is None or self._work.done()
        # Without replicas there is nothing to reduce, and a reducer would soon end by itself.
        if self.count and self._max > 0 and idle and status.alive and not status.is_terminal:
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="reducers")
            self._work = self._pool.submit(self._restart)

    def _tell(self) -> None:
        while not self._events.empty():
            self._on_event(self._events.get())

    def _restart(self) -> None:
        try:
            self._found()
            self._restarter.look(self._observer.observe())
        except DilocoError as error:
            logger.warning("the reducers were not looked after: %s", error.message)

    def _start(self, indices: Sequence[int], attempt: int, backend: str, by: StartedBy) -> None:
        start = Start(ranks=indices, attempt=attempt, backend=backend, world_size=self.count, by=by)
        try:
            mine = announce(self._store, start, at=self._clock())
            if mine:
                start = dataclasses.replace(start, ranks=mine)
                self._launch(self._executors.get(backend), start)
        except (LaunchError, UsageError) as error:
            logger.warning("the run goes on without its reducers: %s", error.message)

    def _launch(self, executor: ServerlessExecutor, start: Start) -> None:
        request = self._request(start)
        start_replicas(
            self._store, self._record, executor, start, request=request, clock=self._clock
        )

    def _request(self, start: Start) -> LaunchRequest:
        return reducers_request(
            self._run,
            self._run_uri,
            backend=start.backend,
            indices=start.ranks,
            attempt=start.attempt,
            name=self._record.name,
        )

    def _found(self) -> None:
        """See to it that there is a record, which tells since when they are waited for."""
        if not self._founded:
            create_json(self._store, keys.RUN, {"reducers_of": self._run.run_id})
            self._founded = True

    # -- ending --------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Ask those that have not ended to stop."""
        if self.count:
            self._found()
            lifecycle.cancel(self._store, self._observer, self._executors, None, clock=self._clock)

    def end(self) -> None:
        """Stop what is left of them now that the run has ended; never raises.

        One that is being started at this moment finds the run over, and ends by itself.
        """
        self._tell()
        if self._pool is not None:
            self._pool.shutdown(wait=False)
        try:
            self.cancel()
            self.release()
        except DilocoError as error:  # they end by themselves, a little later
            logger.warning("the reducers were not stopped: %s", error.message)

    def release(self) -> None:
        """Let executors give back what they keep for reducers that have all ended."""
        if self.count and not self._released and self._store.list(keys.REPLICAS):
            status = self._observer.observe()
            if status.is_terminal:
                lifecycle.release(self._observer, self._executors)
                self._released = True

    def stop(self, timeout: float, sleep: Callable[[float], None]) -> None:
        """Cancel them and wait for their end.

        Args:
            timeout: seconds to wait.
            sleep: waits for so many seconds.

        Raises:
            DilocoError: they did not end in time.
        """
        if not self.count:
            return
        self.cancel()
        deadline = self._clock() + timeout
        while not (status := self._observer.observe()).is_terminal:
            if self._clock() >= deadline:
                going = [view.rank for view in status.replicas if not view.ended]
                raise DilocoError(
                    f"reducers {going} of {self._run.run_id} have not ended yet; "
                    "nothing was deleted",
                    fix="Repeat `down` in a minute.",
                )
            sleep(_INTERVAL_S)
        lifecycle.release(self._observer, self._executors)

    def launched(self) -> list[Launched]:
        """All lives that there have been."""
        return lifecycle.every_launch(self._store) if self.count else []


class _Restarter(Restarter):
    """Starts reducers again."""

    noun = "reducer"
    request_of: Callable[[Start], LaunchRequest]

    def _plan(self, view: ReplicaView, status: RunStatus, now: float) -> Restart | None:
        wished = "cancel" in self._observer.lives.of(view.rank, view.attempt)
        if view.state == "cancelled" and not wished:  # with another one, whose start had failed
            view = dataclasses.replace(view, state="failed", restartable=True)
        return super()._plan(view, status, now)

    def _has_progressed(self, view: ReplicaView) -> bool:
        return bool(view.round)  # rounds served, as its signs of life tell

    def _request(self, start: Start) -> LaunchRequest:
        return self.request_of(start)

    def _event(
        self, kind: EventKind, text: str, rank: int | None = None, attempt: int | None = None
    ) -> Event:
        return super()._event(kind, text)  # it concerns no replica


def _as_a_run(record: RunRecord) -> RunRecord:
    """The record of the run that the reducers would be."""
    spec = dataclasses.replace(
        record.spec, replicas=record.spec.reducers, fleet=(), reducers=0, quorum=None, rounds=None
    )
    object.__setattr__(spec, "run_id", reducers_name(record.spec.run_id))
    return dataclasses.replace(record, spec=spec, name=reducers_name(record.name))
