"""Gathers what the prefix and the executors say about a run, with few requests.

One observation costs three listings (five where there are reducers), one read per live replica's
heartbeat and per round that was decided since the last, and one ``poll`` per replica that has not
ended. Objects written once are read once.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from diloco_cloud import keys
from diloco_cloud.errors import NotFoundError, RunNotFoundError, StoreError
from diloco_cloud.executor import ReplicaStatus, ServerlessExecutor
from diloco_cloud.result import read_result
from diloco_cloud.run.averaging import Averaging, CommitReader
from diloco_cloud.run.executors import Executors
from diloco_cloud.run.lives import Life, Lives, read_lives
from diloco_cloud.run.record import Launched, RunRecord, read_json
from diloco_cloud.run.restart import UNSUPERVISED_S, stale_after
from diloco_cloud.run.status import (
    ReplicaView,
    RunStatus,
    counted_states,
    is_over,
    places,
    run_state,
)
from diloco_cloud.run.tail import failure_tail
from diloco_cloud.run.views import Evidence, missing_replicas, view_replica
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)

_WORKERS = 16

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True)
class _Look:
    """What one observation has found before it turns to single replicas."""

    lives: Lives
    size: int
    averaging: Averaging
    beats: Mapping[int, float]
    notes: list[str]


class Observer:
    """Observes one run, again and again.

    Args:
        store: the run's own prefix.
        record: what its ``run.json`` says.
        executors: of its replicas.
        clock: seconds since the epoch.

    Attributes:
        averaging: what the rounds that are kept said at the last observation.
        lives: what had been started by then.
    """

    def __init__(
        self,
        store: ObjectStore,
        record: RunRecord,
        executors: Executors,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._record = record
        self._executors = executors
        self._clock = clock
        self._commits = CommitReader(store)
        self._immutable: dict[str, dict[str, Any]] = {}
        self._final: dict[Life, ReplicaStatus] = {}
        self._tails: dict[Life, tuple[str, ...]] = {}
        self._offset: float | None = None
        self._launched_at: float | None = None
        self.averaging = Averaging()
        self.lives = Lives()

    @property
    def record(self) -> RunRecord:
        """What the run's ``run.json`` says."""
        return self._record

    def observe(self) -> RunStatus:
        """The run's status now.

        Raises:
            RunNotFoundError: the run has been deleted.
        """
        spec = self._record.spec
        lives = read_lives(self._store)
        if not lives.kinds:
            self._require_run()
        self.lives, self.averaging = lives, self._commits.read()
        look = _Look(lives, self.size(lives), self.averaging, _heartbeat_times(self._store), [])
        ranks = range(self.ranks(lives))
        views = tuple(_parallel(lambda rank: self._view(rank, look), ranks))
        rounds = None if spec.rounds is None else spec.rounds * spec.fragments
        over = self._is_over(views, rounds)
        supervised = self._is_supervised(lives)
        state = run_state(counted_states(views, over=over, supervised=supervised))
        return RunStatus(
            run_id=spec.run_id,
            backend=spec.backend,
            state=state,
            replicas=views,
            size=look.size,
            round=max((view.round for view in views if view.round is not None), default=None),
            rounds=rounds,
            missing=() if state == "succeeded" else missing_replicas(views),
            created_at=self._record.created_at,
            backends=places(views),
            alive=tuple(view.rank for view in views if view.alive),
            breadth=look.averaging.breadth,
            rounds_kept=look.averaging.rounds,
            excluded=look.averaging.excluded,
            over=over,
            supervised=supervised,
            last_commit=_shown(look.averaging.newest),
            reducers=spec.reducers,
            reducers_alive=self._reducers_alive(),
            note="; ".join(sorted(set(look.notes))) or None,
        )

    def size(self, lives: Lives) -> int:
        """How many replicas the run has now."""
        if not lives.size_number:
            return self._record.spec.replicas
        changed = self._once(keys.size(lives.size_number))
        return int((changed or {}).get("replicas", self._record.spec.replicas))

    def _backend_of(self, rank: int, lives: Lives) -> str:
        """Where a rank belongs that nobody has meant to start yet."""
        changed = self._once(keys.size(lives.size_number)) if lives.size_number else None
        backend = ((changed or {}).get("backends") or {}).get(str(rank))
        return str(backend or self._record.spec.backend_of(rank))

    def ranks(self, lives: Lives) -> int:
        """How many ranks the run has or had."""
        return max(self._record.spec.replicas, self.size(lives), lives.ranks)

    def next_attempt(self, view: ReplicaView) -> int:
        """The number of the next life of a replica, as of the last observation."""
        begun = self.lives.newest(view.rank) is not None or view.heartbeat_age_s is not None
        return view.attempt + 1 if begun else 0

    def handles(self) -> dict[int, tuple[int, Launched | None]]:
        """Per rank: its newest attempt, and what was launched for it, if anything was."""
        lives = read_lives(self._store)
        found: dict[int, tuple[int, Launched | None]] = {}
        for rank in range(self.ranks(lives)):
            attempt = lives.newest(rank) or 0
            found[rank] = (attempt, self._launched_as(rank, attempt, lives))
        return found

    def launched(self, rank: int, attempt: int) -> Launched | None:
        """What was launched for one life."""
        values = self._once(keys.handle(rank, attempt))
        return Launched.from_json(values) if values is not None else None

    def _launched_as(self, rank: int, attempt: int, lives: Lives) -> Launched | None:
        launched_as = lives.launched_as(rank, attempt)
        return None if launched_as is None else self.launched(rank, launched_as)

    def intent(self, rank: int, attempt: int) -> Mapping[str, Any]:
        """What the starter of a life wrote before it was started; {} if there is nothing."""
        return self._once(keys.intent(rank, attempt)) or {}

    def backends_used(self) -> tuple[str, ...]:
        """Every backend that replicas were ever meant to be on, as of the last observation."""
        lives = self.lives.kinds.items()
        begun = [life for life, kinds in lives if "intent" in kinds or "handle" in kinds]
        found = dict.fromkeys(self._record.spec.ranks_by_backend)
        for backend in _parallel(lambda life: self._begun_on(*life), begun):
            if backend is not None:
                found[backend] = None
        return tuple(found)

    def _begun_on(self, rank: int, attempt: int) -> str | None:
        # Handles first: those of the newest lives have been read already.
        found = self.launched(rank, attempt) if "handle" in self.lives.of(rank, attempt) else None
        backend = found.backend if found else self.intent(rank, attempt).get("backend")
        return None if backend is None else str(backend)

    # -- one replica ---------------------------------------------------------------------------

    def _view(self, rank: int, look: _Look) -> ReplicaView:
        attempt, beat = self._beat(rank, look)
        kinds = look.lives.of(rank, attempt)
        launched = self._launched_as(rank, attempt, look.lives)
        intent = self._intent(rank, attempt, kinds)
        begun = launched.backend if launched else intent.get("backend")
        backend = str(begun or self._backend_of(rank, look.lives))
        executor = self._executor(backend, look.notes) if launched else None
        polled = self._poll(executor, launched)
        outcome = self._once(keys.outcome(rank, attempt)) if "outcome" in kinds else None
        ended = outcome is not None or (polled is not None and polled.is_terminal)
        evidence = Evidence(
            rank=rank,
            attempt=attempt,
            backend=backend,
            launched=launched is not None,
            polled=polled,
            outcome=outcome,
            heartbeat=beat,
            heartbeat_age_s=self._age(look.beats[rank], exact=not ended) if beat else None,
            stale_s=stale_after(self._record.spec.heartbeat),
            intent=intent,
            intent_age_s=None if ended or beat or launched else self._start_age(rank, look),
            stopped=self._once(keys.stopped(rank, attempt)) if "stopped" in kinds else None,
            hung=self._once(keys.hung(rank, attempt)) if "hung" in kinds else None,
            cancel_requested="cancel" in kinds,
            restarts=look.lives.restarts(rank),
            participation=look.averaging.share(rank),
            merged=look.averaging.merged.get(rank),
            retired=rank >= look.size,
        )
        view = view_replica(evidence)
        if view.state != "failed":
            return view
        tail = self._tail((rank, attempt), launched, executor, outcome)
        return dataclasses.replace(view, log_tail=tail)

    def _beat(self, rank: int, look: _Look) -> tuple[int, dict[str, Any] | None]:
        """The newest attempt of a rank, and its heartbeat if it has sent one."""
        newest = look.lives.newest(rank) or 0
        beat = read_json(self._store, keys.alive(rank)) if rank in look.beats else None
        beaten = (beat or {}).get("attempt", 0)
        if beat is None or beaten < newest:  # of an earlier life
            return newest, None
        return beaten, beat

    def _intent(self, rank: int, attempt: int, kinds: Mapping[str, float]) -> Mapping[str, Any]:
        # That of a first life says nothing that its handle does not.
        needed = "intent" in kinds and (attempt > 0 or "handle" not in kinds)
        return self.intent(rank, attempt) if needed else {}

    def _executor(self, backend: str, notes: list[str]) -> ServerlessExecutor | None:
        executor, note = self._executors.find(backend)
        if note is not None:  # its SDK is not on this machine: the prefix must do
            notes.append(note)
        return executor

    def _poll(
        self, executor: ServerlessExecutor | None, launched: Launched | None
    ) -> ReplicaStatus | None:
        if executor is None or launched is None:
            return None
        life = (launched.handle.rank, launched.attempt)
        if life not in self._final:
            status = executor.poll(launched.handle)
            if not status.is_terminal:
                return status
            self._final[life] = status
        return self._final[life]

    def _start_age(self, rank: int, look: _Look) -> float:
        """Seconds since somebody last said that a replica is being started, or is to be."""
        attempt = look.lives.newest(rank)
        at = None if attempt is None else look.lives.of(rank, attempt).get("intent")
        if at is None and rank >= self._record.spec.replicas:
            at = look.lives.size_at  # the run has grown
        if at is None:
            if self._launched_at is None:
                self._launched_at = self._store.head(keys.RUN).last_modified
            at = self._launched_at
        return self._age(at, exact=True)

    def _tail(
        self,
        life: Life,
        launched: Launched | None,
        executor: ServerlessExecutor | None,
        outcome: Mapping[str, Any] | None,
    ) -> tuple[str, ...]:
        if life not in self._tails:
            handle = launched.handle if launched else None
            self._tails[life] = failure_tail(self._store, life, handle, executor, outcome)
        return self._tails[life]

    # -- the store -----------------------------------------------------------------------------

    def _require_run(self) -> None:
        """Whoever watches a run that somebody deletes must not watch for ever."""
        try:
            self._store.head(keys.RUN)
        except NotFoundError:
            raise RunNotFoundError(f"{self._record.spec.run_id} has been deleted") from None

    def _is_over(self, views: tuple[ReplicaView, ...], rounds: int | None) -> bool:
        if not any(view.restartable for view in views):
            return False  # it makes no difference, and costs a request
        result = read_result(self._store)
        return is_over(views, None if result is None else result.manifest, rounds)

    def _is_supervised(self, lives: Lives) -> bool:
        at = lives.supervised_at
        return at is not None and self._age(at, exact=True) <= UNSUPERVISED_S

    def _once(self, key: str) -> dict[str, Any] | None:
        if key not in self._immutable:
            values = read_json(self._store, key)
            if values is None:
                return None
            self._immutable[key] = values
        return self._immutable[key]

    def _reducers_alive(self) -> int:
        """How many reducers give signs of life, and have not said that they end."""
        if not self._record.spec.reducers:
            return 0
        store = self._store.child(keys.REDUCERS)
        lives, stale_s = read_lives(store), stale_after(self._record.spec.heartbeat)
        return sum(
            "outcome" not in lives.of(index, lives.newest(index) or 0)
            and self._age(at, exact=True) <= stale_s
            for index, at in _heartbeat_times(store).items()
        )

    def _age(self, at: float, *, exact: bool) -> float:
        """Seconds since the store's time ``at``; ``exact`` where a state hangs on it."""
        if exact and self._offset is None:
            self._offset = self._measure_offset()
        return max(0.0, self._clock() + (self._offset or 0.0) - at)

    def _measure_offset(self) -> float:
        """How far the store's clock is ahead of ours, by writing something and looking."""
        try:
            self._store.put(keys.CLOCK, b"")
            return self._store.head(keys.CLOCK).last_modified - self._clock()
        except StoreError as error:  # read-only access still deserves an answer
            logger.info("the store's clock cannot be read (%s); trusting this machine's", error)
            return 0.0


def _heartbeat_times(store: ObjectStore) -> dict[int, float]:
    """By rank, when its heartbeat was written, by the store's clock."""
    found = {keys.parse_alive(info.key): info.last_modified for info in store.list(keys.ALIVE)}
    return {rank: at for rank, at in found.items() if rank is not None}


def _shown(commit: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What ``status`` shows of a commit."""
    if commit is None:
        return None
    ranks = [one.get("rank") for one in commit.get("contributors", ())]
    shown = ("round", "fragment", "step", "decision", "reason", "excluded")
    return {key: commit.get(key) for key in shown} | {"contributors": ranks}


def _parallel(function: Callable[[_In], _Out], items: Iterable[_In]) -> list[_Out]:
    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="observe") as pool:
        return list(pool.map(function, items))
