"""Gathers what the prefix and the executor say about a run, with few requests.

One observation costs two listings, one read per live replica's heartbeat and one ``poll`` per
replica that has not ended. Objects written once are read once.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from diloco_cloud import keys
from diloco_cloud.errors import NotFoundError, RunNotFoundError, StoreError, UsageError
from diloco_cloud.executor import ReplicaHandle, ReplicaStatus, ServerlessExecutor
from diloco_cloud.run.logs import chunk_tail, render_tail
from diloco_cloud.run.record import RunRecord, list_lives, read_json, to_handle
from diloco_cloud.run.status import (
    Evidence,
    RunStatus,
    missing_replicas,
    run_state,
    view_replica,
)
from diloco_cloud.run.tracebacks import end_of_log, without_plumbing
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)

#: Lines of a failed replica's log that ``status`` shows.
TAIL_LINES = 20
#: Lines that are read for it: more, as what surrounds a trainer's own error is left out.
_READ_LINES = 200
_WORKERS = 16

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Observer:
    """Observes one run, again and again.

    Args:
        store: the run's own prefix.
        record: what its ``run.json`` says.
        executor: returns the run's executor, or raises ``UsageError`` where it can't be had here.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        store: ObjectStore,
        record: RunRecord,
        executor: Callable[[], ServerlessExecutor],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._record = record
        self._executor = executor
        self._clock = clock
        self._immutable: dict[str, dict[str, Any]] = {}
        self._final: dict[tuple[int, int], ReplicaStatus] = {}
        self._tails: dict[tuple[int, int], tuple[str, ...]] = {}
        self._offset: float | None = None

    def observe(self) -> RunStatus:
        """The run's status now.

        Raises:
            RunNotFoundError: the run has been deleted.
        """
        spec = self._record.spec
        lives = list_lives(self._store)
        if not lives:
            self._require_run()
        ages = self._heartbeat_times()
        executor, note = self._ask_executor()

        def gather(rank: int) -> Evidence:
            return self._evidence(rank, lives, ages.get(rank), executor)

        views = tuple(view_replica(e) for e in _parallel(gather, range(spec.replicas)))
        rounds = [view.round for view in views if view.round is not None]
        state = run_state([view.state for view in views])
        return RunStatus(
            run_id=spec.run_id,
            backend=spec.backend,
            state=state,
            replicas=views,
            round=max(rounds, default=None),
            rounds=None if spec.rounds is None else spec.rounds * spec.fragments,
            missing=() if state == "succeeded" else missing_replicas(views),
            created_at=self._record.created_at,
            last_commit=self._last_commit(),
            note=note,
        )

    def _require_run(self) -> None:
        """Whoever watches a run that somebody deletes must not watch for ever."""
        try:
            self._store.head(keys.RUN)
        except NotFoundError:
            raise RunNotFoundError(f"{self._record.spec.run_id} has been deleted") from None

    def handles(self) -> dict[int, tuple[int, ReplicaHandle | None]]:
        """Per rank: its newest attempt, and the handle of that attempt where there is one."""
        lives = list_lives(self._store)
        found: dict[int, tuple[int, ReplicaHandle | None]] = {}
        for rank in range(self._record.spec.replicas):
            attempt = max((a for r, a in lives if r == rank), default=0)
            has_handle = "handle" in lives.get((rank, attempt), ())
            found[rank] = (attempt, self._handle(rank, attempt) if has_handle else None)
        return found

    def _ask_executor(self) -> tuple[ServerlessExecutor | None, str | None]:
        try:
            return self._executor(), None
        except UsageError as error:  # its SDK is not on this machine: the prefix must do
            return None, error.message

    def _evidence(
        self,
        rank: int,
        lives: dict[tuple[int, int], set[str]],
        beat_at: float | None,
        executor: ServerlessExecutor | None,
    ) -> Evidence:
        beat = read_json(self._store, keys.alive(rank)) if beat_at is not None else None
        newest = [a for r, a in lives if r == rank] + ([beat.get("attempt", 0)] if beat else [])
        attempt = max(newest, default=0)
        if beat is not None and beat.get("attempt", 0) != attempt:
            beat, beat_at = None, None  # of an earlier life
        kinds = lives.get((rank, attempt), set())
        handle = self._handle(rank, attempt) if "handle" in kinds else None
        polled = self._poll(executor, handle, attempt)
        outcome = self._once(keys.outcome(rank, attempt)) if "outcome" in kinds else None
        known = polled is not None and polled != "unknown"
        age = self._age(beat_at, exact=not known and outcome is None) if beat_at else None
        evidence = Evidence(
            rank=rank,
            attempt=attempt,
            launched=handle is not None,
            polled=polled,
            outcome=outcome,
            heartbeat=beat,
            heartbeat_age_s=age,
            cancel_requested="cancel" in kinds,
        )
        if view_replica(evidence).state != "failed":
            return evidence
        tail = self._tail(rank, attempt, handle, executor, outcome)
        return dataclasses.replace(evidence, log_tail=tail)

    def _handle(self, rank: int, attempt: int) -> ReplicaHandle | None:
        values = self._once(keys.handle(rank, attempt))
        return to_handle(values) if values is not None else None

    def _poll(
        self, executor: ServerlessExecutor | None, handle: ReplicaHandle | None, attempt: int
    ) -> ReplicaStatus | None:
        if executor is None or handle is None:
            return None
        life = (handle.rank, attempt)
        if life not in self._final:
            status = executor.poll(handle)
            if not status.is_terminal:
                return status
            self._final[life] = status
        return self._final[life]

    def _once(self, key: str) -> dict[str, Any] | None:
        if key not in self._immutable:
            values = read_json(self._store, key)
            if values is None:
                return None
            self._immutable[key] = values
        return self._immutable[key]

    def _heartbeat_times(self) -> dict[int, float]:
        by_key = {info.key: info.last_modified for info in self._store.list(keys.ALIVE)}
        ranks = range(self._record.spec.replicas)
        return {rank: by_key[key] for rank in ranks if (key := keys.alive(rank)) in by_key}

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

    def _tail(
        self,
        rank: int,
        attempt: int,
        handle: ReplicaHandle | None,
        executor: ServerlessExecutor | None,
        outcome: dict[str, Any] | None,
    ) -> tuple[str, ...]:
        life = (rank, attempt)
        if life not in self._tails:
            lines = []
            if executor is not None and handle is not None:
                lines = render_tail(executor.stream_logs(handle, n_lines=_READ_LINES))
            lines = lines or chunk_tail(self._store, rank, attempt, _READ_LINES)
            trace = str((outcome or {}).get("traceback") or "").rstrip().splitlines()
            if trace and not _says(lines, trace[-1]):
                lines += trace
            self._tails[life] = tuple(end_of_log(without_plumbing(lines), TAIL_LINES))
        return self._tails[life]

    def _last_commit(self) -> dict[str, Any] | None:
        """The newest round that was agreed on; the very newest may still be open."""
        for name in reversed(self._store.list_dirs(keys.ROUNDS)[-4:]):
            key = f"{keys.ROUNDS}{name}/commit"
            commit = self._once(key)
            if commit is not None:
                shown = ("round", "fragment", "step", "decision", "reason", "excluded")
                ranks = [one.get("rank") for one in commit.get("contributors", ())]
                return {key: commit.get(key) for key in shown} | {"contributors": ranks}
        return None


def _says(lines: Iterable[str], error: str) -> bool:
    """Whether a log has the last line of a traceback, with or without the error's class."""
    message = error.partition(": ")[2] or error
    return any(message in line for line in lines)


def _parallel(function: Callable[[_In], _Out], items: Iterable[_In]) -> list[_Out]:
    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="observe") as pool:
        return list(pool.map(function, items))
