"""One run, from any process that can reach its store."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from diloco_cloud.errors import ConfigError, CorruptError
from diloco_cloud.executor import ServerlessExecutor, State
from diloco_cloud.run import lifecycle
from diloco_cloud.run.executors import Executors, Given
from diloco_cloud.run.follow import read_logs
from diloco_cloud.run.logs import LogLine
from diloco_cloud.run.observe import Observer
from diloco_cloud.run.record import RunRecord, parent_uri, read_run, run_not_found
from diloco_cloud.run.reducers import Reducers
from diloco_cloud.run.restarter import Event
from diloco_cloud.run.results import RunResults, read_metrics, read_results
from diloco_cloud.run.resume import resume
from diloco_cloud.run.spec import RunSpec
from diloco_cloud.run.status import RunStatus
from diloco_cloud.run.supervise import INTERVAL_S, Supervisor, ignore
from diloco_cloud.store import open_store
from diloco_cloud.store.base import ObjectStore
from diloco_cloud.store.directory import DirectoryStore

logger = logging.getLogger(__name__)

#: Seconds between two looks at a run: quick at first, then easy on providers' rate limits.
_FIRST_INTERVAL = 0.5
_LAST_INTERVAL = 10.0


class Run:
    """A run that was launched, now or long ago, here or elsewhere.

    Made by :func:`diloco_cloud.launch` or :meth:`open`.

    Args:
        store: the run's own prefix.
        record: what its ``run.json`` says.
        executor: of the spec's backend, or several by backend; default: the registry's, when they
            are first needed.
        store_uri: where the prefix lies, as the user has it: a plain directory may be one that only
            this machine sees. Default: as the store has it, which is taken at its word.
        clock: seconds since the epoch.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        store: ObjectStore,
        record: RunRecord,
        *,
        executor: Given = None,
        store_uri: str | None = None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._store_uri = store_uri or parent_uri(store)
        self._record = record
        spec = record.spec
        self._executors = Executors(spec.backend, executor, spec.backend_args)
        self._clock = clock
        self._sleep = sleep
        self._observer = Observer(store, record, self._executors, clock=clock)
        self._reducers = Reducers(store, record, self._executors, clock=clock)

    @classmethod
    def open(
        cls,
        store_uri: str | os.PathLike[str],
        run_id: str,
        *,
        executor: Given = None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Run:
        """Find a run again.

        Raises:
            RunNotFoundError: no such run in that store.
        """
        store = open_store(os.fspath(store_uri))
        try:
            prefix = store.child(run_id)
        except ValueError:
            raise run_not_found(store, run_id) from None
        record = read_run(prefix)
        if record is None:
            raise run_not_found(store, run_id)
        given = os.fspath(store_uri)
        return cls(prefix, record, executor=executor, store_uri=given, clock=clock, sleep=sleep)

    def __repr__(self) -> str:
        return f"Run({self.uri!r})"

    @property
    def run_id(self) -> str:
        return self._record.spec.run_id

    @property
    def provider_name(self) -> str:
        """What its replicas' names begin with where they run."""
        return self._record.name

    @property
    def spec(self) -> RunSpec:
        return self._record.spec

    @property
    def created_at(self) -> float:
        """Seconds since the epoch, by the launcher's clock."""
        return self._record.created_at

    @property
    def store(self) -> ObjectStore:
        """The run's own prefix."""
        return self._store

    @property
    def uri(self) -> str:
        """The URI of the run's prefix."""
        return self._store.uri

    @property
    def store_uri(self) -> str:
        """The URI of the store that the prefix lies in."""
        return parent_uri(self._store)

    @property
    def executor(self) -> ServerlessExecutor:
        """The executor of the backend that the run was launched on.

        Raises:
            UsageError: it is not installed on this machine.
        """
        return self._executors.get()

    def status(self) -> RunStatus:
        """What the prefix and the executor say now."""
        status = self._observer.observe()
        if status.is_terminal:
            lifecycle.release(self._observer, self._executors)
            self._reducers.release()
        return status

    def watch(self, interval: float | None = None) -> Iterator[RunStatus]:
        """Statuses until the run has ended, the last one being terminal.

        Args:
            interval: seconds between two; by default growing from 0.5 to 10.
        """
        pause = _FIRST_INTERVAL if interval is None else interval
        while True:
            status = self.status()
            yield status
            if status.is_terminal:
                return
            self._sleep(pause)
            if interval is None:
                pause = min(pause * 1.3, _LAST_INTERVAL)

    def wait(self, timeout: float | None = None) -> RunStatus:
        """Wait until the run has ended, or ``timeout`` seconds have passed.

        Returns the last status seen: check ``is_terminal``. Never raises for a run's failure.
        """
        deadline = None if timeout is None else self._clock() + timeout
        pause = _FIRST_INTERVAL
        while True:
            status = self.status()
            left = None if deadline is None else deadline - self._clock()
            if status.is_terminal or (left is not None and left <= 0):
                return status
            self._sleep(pause if left is None else min(pause, left))
            pause = min(pause * 1.3, _LAST_INTERVAL)

    def logs(
        self,
        *,
        follow: bool = False,
        tail: int | None = None,
        since: float | None = None,
        ranks: Sequence[int] | None = None,
        interval: float = 1.0,
    ) -> Iterator[LogLine]:
        """The replicas' logs, merged in time order.

        Args:
            follow: go on until the run has ended. Its state decides that, never a silent log.
            tail: begin with the last so many lines.
            since: begin with the lines of the last so many seconds.
            ranks: only these.
            interval: seconds between two looks for new lines.

        Raises:
            UsageError: a rank that the run does not have.
        """
        chosen = lifecycle.check_ranks(self.run_id, len(self._observer.handles()), ranks)

        def states() -> list[State]:
            views = self.status().replicas
            return [views[rank].state for rank in chosen]

        return read_logs(
            self._store,
            chosen,
            states=states,
            native_output=self._native_output,
            follow=follow,
            tail=tail,
            since=None if since is None else self._clock() - since,
            pause=lambda: self._sleep(interval),
        )

    def cancel(self, ranks: Sequence[int] | None = None) -> list[int]:
        """Ask replicas to stop; returns the ranks asked. Replicas that have ended are left alone.

        Reducers are asked too, unless ranks are named.

        Raises:
            UsageError: a rank that the run does not have, or its executor is not installed here.
        """
        try:
            return lifecycle.cancel(
                self._store, self._observer, self._executors, ranks, clock=self._clock
            )
        finally:
            if ranks is None:
                self._reducers.cancel()

    def resume(
        self,
        ranks: Sequence[int] | None = None,
        *,
        replicas: int | Mapping[str, int] | None = None,
        backend: str | None = None,
    ) -> list[int]:
        """Start replicas that have ended again, with the same spec; returns their ranks.

        Args:
            ranks: default: all that have failed, were cancelled or were never started.
            replicas: how many the run is to have from now on, or how many on each backend. More
                are started, be the others running or not; those beyond retire, and must have ended.
            backend: where to start them; default: where each of them was before.

        Raises:
            UsageError: nothing to resume: the run has succeeded, or its replicas are running; or a
                backend cannot do its part. Nothing was started.
            LaunchError: a backend failed; what had been started, on any of them, was cancelled.
        """
        started = resume(
            self._store,
            self._record,
            self._observer,
            self._executors,
            ranks,
            store_uri=self._store_uri,
            replicas=replicas,
            backend=backend,
            clock=self._clock,
        )
        self._reducers.resume()
        return started

    def start_reducers(self) -> None:
        """Start the volunteer reducers of a run that has just been launched.

        Where there is no room for them, that is logged, and the run goes on without.
        """
        try:
            self._reducers.launch()
        except BaseException:  # Ctrl-C too must not leave billed replicas behind
            self.cancel()
            raise

    def supervisor(
        self,
        *,
        max_restarts: int | None = None,
        on_event: Callable[[Event], None] = ignore,
    ) -> Supervisor:
        """What starts replicas again that died of something other than themselves.

        Args:
            max_restarts: in a row, of a replica that does not get into a round in between;
                default: the run's own setting. 0: nothing is started again.
            on_event: told what happens.
        """
        return Supervisor(
            self._store,
            self._record,
            self._observer,
            self._executors,
            max_restarts=max_restarts,
            on_event=on_event,
            clock=self._clock,
            sleep=self._sleep,
        )

    def supervise(
        self,
        *,
        max_restarts: int | None = None,
        on_event: Callable[[Event], None] = ignore,
        interval: float = INTERVAL_S,
    ) -> RunStatus:
        """Wait until the run has ended, starting again what dies; see :meth:`supervisor`.

        Any number of processes may do so at once, and each may be killed at any time.

        Args:
            max_restarts: see there.
            on_event: see there.
            interval: seconds between two looks.

        Raises:
            UsageError: replicas cannot be started from this machine.
        """
        return self.supervisor(max_restarts=max_restarts, on_event=on_event).run(interval)

    def down(self, *, cancel: bool = False, timeout: float = 60.0) -> int:
        """Delete everything the run has in its store; returns the number of objects.

        What its executor has kept of the replicas (logs, records) goes too, where that can be had.

        Args:
            cancel: cancel replicas that are still going, and wait for their end.
            timeout: seconds to wait for it.

        Raises:
            UsageError: the run is still going, and ``cancel`` is false.
            DilocoError: the replicas or reducers did not end in time, or a provider cannot tell
                whether a launcher that died has started more; nothing was deleted.
        """
        status = self.status()
        if not status.is_terminal:
            lifecycle.refuse_unless(cancel, status)
            self.cancel()
            lifecycle.require_ended(self.wait(timeout))
        lifecycle.cancel_unrecorded(self._store, self._observer, self._executors)
        self._reducers.stop(timeout, self._sleep)
        launched = [*lifecycle.every_launch(self._store), *self._reducers.launched()]
        count = lifecycle.delete(self._store)
        lifecycle.forget(launched, self._executors)
        return count

    def metrics(self) -> list[dict[str, Any]]:
        """What each replica reported of each round, by rank, attempt and round."""
        return read_metrics(self._store)

    def results(self) -> RunResults:
        """What replicas returned, and the exported result where there is one."""
        return read_results(self._store, len(self._observer.handles()))

    def _native_output(self, rank: int, n_lines: int) -> str:
        """The end of what a replica's process wrote to stdout and stderr; "" if not to be had."""
        _, launched = self._observer.handles()[rank]
        if launched is None:
            return ""
        executor = self._executors.get(launched.backend)
        return executor.stream_logs(launched.handle, n_lines=n_lines)


def list_runs(store_uri: str | os.PathLike[str]) -> list[Run]:
    """The runs of a store, newest first.

    Raises:
        NotFoundError: there is no such directory or bucket.
    """
    store = open_store(os.fspath(store_uri))
    if isinstance(store, DirectoryStore):
        store.require()
    runs = []
    for name in store.list_dirs(""):
        prefix = store.child(name)
        try:
            record = read_run(prefix)
        except (CorruptError, ConfigError) as error:  # one bad run must not hide the others
            logger.warning("%s is left out: %s", name, error.message)
            continue
        if record is not None:
            runs.append(Run(prefix, record))
    return sorted(runs, key=lambda run: run.created_at, reverse=True)
