"""Decides which replicas of a run are started again, and starts them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from diloco_cloud import keys
from diloco_cloud.errors import (
    ExpiredCredentialsError,
    LaunchError,
    ThrottledError,
    UnreachableError,
    UsageError,
)
from diloco_cloud.run.executors import Executors
from diloco_cloud.run.intents import Start, announce
from diloco_cloud.run.lives import Life, read_lives
from diloco_cloud.run.observe import Observer
from diloco_cloud.run.record import RunRecord, create_json
from diloco_cloud.run.restart import ABANDONED_S, restart_delay
from diloco_cloud.run.start import LaunchRequest, import_path, start_replicas, start_request
from diloco_cloud.run.status import ReplicaView, RunStatus
from diloco_cloud.run.views import why_ended
from diloco_cloud.store.base import ObjectStore

EventKind: TypeAlias = Literal["died", "restarted", "refused", "given_up", "hung", "trouble"]

#: Starts under way at once.
_STARTS = 8


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that a supervisor saw or did.

    Attributes:
        kind: "died": a replica ended and is to be started again; "restarted": it was; "refused": a
            start failed; "given_up": it ended, and is not started again; "hung": it lives and
            stands still, and is ended; "trouble": the store could not be reached, or something
            cannot be started or ended from this machine; it will be tried again.
        time: seconds since the epoch.
        rank, attempt: of the replica, and which life of it; None where it concerns none.
        text: one line for people.
    """

    kind: EventKind
    time: float
    text: str
    rank: int | None = None
    attempt: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = dataclasses.asdict(self)
        return {"event": values.pop("kind"), **values}


@dataclass(frozen=True)
class Restart:
    """A replica that is to be started again.

    Attributes:
        view: of the life that ended, or whose start was abandoned.
        in_a_row: counts the restarts since the rank was last in a round, this one included.
        due: when, by the supervisor's clock.
    """

    view: ReplicaView
    in_a_row: int
    due: float


@dataclass(frozen=True)
class _Barred:
    """A replica that this machine was found unable to start.

    Attributes:
        times: in a row.
        until: it is not tried again, by the supervisor's clock.
    """

    times: int
    until: float


class Restarter:
    """Starts replicas again that died of something other than themselves.

    Args:
        store: the run's own prefix.
        record: what its ``run.json`` says.
        observer: of the run.
        executors: of its replicas.
        max_restarts: in a row, of a replica that does not get into a round in between.
        on_event: told what happens.
        clock: seconds since the epoch.
    """

    #: What events call the one that is started.
    noun = "replica"

    def __init__(
        self,
        store: ObjectStore,
        record: RunRecord,
        observer: Observer,
        executors: Executors,
        *,
        max_restarts: int,
        on_event: Callable[[Event], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._record = record
        self._observer = observer
        self._executors = executors
        self._max = max_restarts
        self._on_event = on_event
        self._clock = clock
        self._deaths: dict[Life, float] = {}
        self._settled: set[Life] = set()
        self._barred: dict[int, _Barred] = {}

    def look(self, status: RunStatus, *, without: Collection[str] = ()) -> bool:
        """Act on what a status shows; whether something is left to be started again from here.

        Args:
            status: the observer's newest.
            without: backends on which nothing can be started from this machine.
        """
        now = self._clock()
        views = [view for view in status.replicas if view.backend not in without]
        restarts = [restart for view in views if (restart := self._plan(view, status, now))]
        due = [restart for restart in restarts if self._due_here(restart) <= now]
        if due:
            with ThreadPoolExecutor(_STARTS, thread_name_prefix="restart") as pool:
                events = pool.map(lambda restart: self._start(restart, status.size), due)
                for event in filter(None, events):
                    self._on_event(event)
        return any(restart.view.rank not in self._barred for restart in restarts)

    # -- deciding ------------------------------------------------------------------------------

    def _plan(self, view: ReplicaView, status: RunStatus, now: float) -> Restart | None:
        """The restart of a replica, if it needs one and may have it."""
        if view.retired or (view.rank, view.attempt) in self._settled:
            return None
        if view.state == "pending":
            if view.launched or (view.starting_s or 0.0) <= ABANDONED_S:
                return None
            # Whoever announced its start died before there was anything to count.
            return Restart(view, self._in_a_row(view), now)
        if view.state != "failed":
            return None
        count = 1 + (0 if self._has_progressed(view) else self._in_a_row(view))
        if not view.restartable:
            self._settle(view, "it would only happen again")
        elif status.over:
            self._settle(view, "the run's result is there")
        elif count > self._max:
            self._give_up(view)
        else:
            return Restart(view, count, self._due(view, count, now))
        return None

    def _in_a_row(self, view: ReplicaView) -> int:
        """How many restarts in a row led to this life, which is the last of them."""
        count = self._observer.intent(view.rank, view.attempt).get("in_a_row")
        return count if isinstance(count, int) else 0

    def _has_progressed(self, view: ReplicaView) -> bool:
        return self._observer.averaging.progressed(view.rank, view.attempt)

    def _due(self, view: ReplicaView, count: int, now: float) -> float:
        """When to start it again; tells of its death the first time."""
        life = (view.rank, view.attempt)
        delay = restart_delay(count, view.reason)
        if life not in self._deaths:
            self._deaths[life] = now
            when = f" in {delay:.0f} s" if delay else ""
            text = f"{self._ended(view)}; restart {count} of {self._max} in a row{when}"
            self._on_event(self._event("died", text, *life))
        return self._deaths[life] + delay

    def _due_here(self, restart: Restart) -> float:
        """When to start it again from this machine, which may have been found unable to."""
        barred = self._barred.get(restart.view.rank)
        return restart.due if barred is None else max(restart.due, barred.until)

    def _give_up(self, view: ReplicaView) -> None:
        times = "restart" if self._max == 1 else "restarts"
        reason = f"{self._max} {times} in a row, none of which got into a round"
        stopped = {"rank": view.rank, "attempt": view.attempt, "reason": reason}
        create_json(self._store, keys.stopped(view.rank, view.attempt), stopped)
        self._settle(view, reason)

    def _settle(self, view: ReplicaView, why: str) -> None:
        life = (view.rank, view.attempt)
        self._settled.add(life)
        self._on_event(
            self._event("given_up", f"{self._ended(view)}; not started again: {why}", *life)
        )

    # -- acting --------------------------------------------------------------------------------

    def _start(self, restart: Restart, size: int) -> Event | None:
        """Start a replica again, unless somebody else does; runs in a thread of its own."""
        rank = restart.view.rank
        try:
            attempt = self._start_or_raise(restart, size)
        except UsageError as error:  # another machine may be able to
            self._bar(rank)
            text = f"{self.noun} {rank} cannot be started from here: {error.message}"
            return self._event("refused", text, rank)
        except LaunchError as error:  # recorded, for the next look to read
            return self._event(
                "refused", f"{self.noun} {rank} was not started: {error.message}", rank
            )
        except (UnreachableError, ThrottledError, ExpiredCredentialsError) as error:
            return self._event(
                "trouble", f"{self.noun} {rank} was not started: {error.message}", rank
            )
        self._barred.pop(rank, None)
        if attempt is None:
            return None
        text = f"{self.noun} {rank} is started again, as attempt {attempt}"
        return self._event("restarted", text, rank, attempt)

    def _bar(self, rank: int) -> None:
        """Leave a rank to other machines for a while, the longer the more often it was tried."""
        times = self._barred[rank].times + 1 if rank in self._barred else 1
        until = self._clock() + restart_delay(times + 1, "no_capacity")
        self._barred[rank] = _Barred(times, until)

    def _start_or_raise(self, restart: Restart, size: int) -> int | None:
        """Start a replica again; its attempt, or None where it was not ours to start."""
        view = restart.view
        backend = view.backend or self._record.spec.backend_of(view.rank)
        executor = self._executors.get(backend)
        start = Start(
            ranks=[view.rank],
            attempt=self._observer.next_attempt(view),
            backend=backend,
            world_size=size,
            by="supervisor",
            after={view.rank: why_ended(view)} if view.ended else {},
            in_a_row=restart.in_a_row,
        )
        request = self._request(start)
        # Before the announcement: what we lack, others may have. A provider that cannot be asked
        # will refuse the launch, too, and that counts.
        with import_path(self._record.directory), contextlib.suppress(LaunchError):
            request.check(executor)
        if not announce(self._store, start, at=self._clock()):
            return None  # another supervisor's, or a user's: the next look shows what came of it
        if self._is_unwanted(view, start.attempt):
            return None
        start_replicas(
            self._store, self._record, executor, start, request=request, clock=self._clock
        )
        return start.attempt

    def _request(self, start: Start) -> LaunchRequest:
        """What the executor is asked for."""
        return start_request(self._record, self._store.uri, start)

    def _is_unwanted(self, view: ReplicaView, attempt: int) -> bool:
        """Whether a user cancelled the replica after it was looked at.

        A cancellation is written before the lives are listed, and a start announced before this
        listing, so at least one of the two sees the other.
        """
        if "cancel" not in read_lives(self._store).of(view.rank, view.attempt):
            return False
        outcome = {"rank": view.rank, "attempt": attempt, "state": "cancelled"}
        create_json(self._store, keys.outcome(view.rank, attempt), outcome)
        return True

    def _event(
        self, kind: EventKind, text: str, rank: int | None = None, attempt: int | None = None
    ) -> Event:
        return Event(kind=kind, time=self._clock(), text=text, rank=rank, attempt=attempt)

    def _ended(self, view: ReplicaView) -> str:
        life = f" (attempt {view.attempt})" if view.attempt else ""
        return f"{self.noun} {view.rank}{life} ended: {why_ended(view)}"
