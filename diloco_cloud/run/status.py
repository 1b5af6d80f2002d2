"""What a run's state is, as a pure function of what is known about its replicas.

Who decides, for the newest life of a rank:

1. The executor's ``poll``, whenever it can be asked. One exception: "lost" (the provider has
   forgotten the job) yields to an outcome, which is the replica's own last word.
2. The outcome that the replica wrote when it ended.
3. The heartbeat: a fresh one means running.
4. Otherwise the state is unknown; or pending, if nothing was launched yet.

A replica that was killed after its cancellation had been asked for is cancelled, not failed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_cloud.executor import TERMINAL_STATES, ReplicaStatus, State
from diloco_cloud.run.durations import format_duration

#: A replica that has been silent for longer is no longer taken to be running.
HEARTBEAT_STALE_S = 60.0
#: Ends of a process that a cancellation brings about: by signal, or the shell's code for one.
_CANCEL_EXIT_CODES = frozenset({-2, -9, -15, 130, 137, 143})


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known of the newest life of one rank.

    Attributes:
        launched: the executor returned a handle.
        polled: the executor's answer; None if it could not be asked.
        outcome: the replica's last word, as it wrote it.
        heartbeat: the replica's newest sign of life in this life.
        heartbeat_age_s: by the store's clock.
        cancel_requested: a user asked for this life to end.
        log_tail: the end of its log, where it has failed.
    """

    rank: int
    attempt: int = 0
    launched: bool = False
    polled: ReplicaStatus | None = None
    outcome: Mapping[str, Any] | None = None
    heartbeat: Mapping[str, Any] | None = None
    heartbeat_age_s: float | None = None
    cancel_requested: bool = False
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """One replica, as ``status`` shows it.

    Attributes:
        phase: what it was doing at its last heartbeat: starting, joining, training, syncing, …
        round: rounds agreed so far.
        step: outer steps committed.
        waiting_for: ranks whose contribution it was waiting for.
        excluded: why the others left it out of a round, or None.
        error: one line, or None.
    """

    rank: int
    attempt: int
    state: State
    phase: str | None = None
    reason: str | None = None
    exit_code: int | None = None
    error: str | None = None
    round: int | None = None
    step: int | None = None
    inner_step: int | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    loss: float | None = None
    heartbeat_age_s: float | None = None
    waiting_for: tuple[int, ...] = ()
    excluded: str | None = None
    host: str | None = None
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """One run, as ``status`` shows it.

    Attributes:
        state: see :func:`run_state`.
        round: rounds that the furthest replica has agreed on; None before the first heartbeat.
        rounds: how many there will be, over all fragments; None if the trainer decides.
        missing: ranks that are not where the others are, and why.
        last_commit: round, fragment, decision, contributors and excluded of the newest commit.
        note: why the executor could not be asked, where it could not.
    """

    run_id: str
    backend: str
    state: State
    replicas: tuple[ReplicaView, ...]
    round: int | None
    rounds: int | None
    missing: tuple[tuple[int, str], ...]
    created_at: float
    last_commit: Mapping[str, Any] | None = None
    note: str | None = None

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL_STATES

    @property
    def tokens_per_s(self) -> float:
        """Of all replicas that get on; 0 where none does.

        A replica's own figure is that of its last round, and says nothing of one that has fallen
        silent, or waits for another that is not in the rounds.
        """
        views = [view for view in self.replicas if _takes_part(view)]
        present = {view.rank for view in views}
        moving = (view for view in views if present.issuperset(view.waiting_for))
        return sum(view.tokens_per_s or 0.0 for view in moving)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        missing = [{"rank": rank, "why": why} for rank, why in self.missing]
        return {**dataclasses.asdict(self), "missing": missing}


def run_state(states: Sequence[State]) -> State:
    """The run's state, from its replicas'.

    ========================================================  =========
    while any replica is running                              running
    else, while any is pending                                pending
    else, if any cannot be told                               unknown
    else, if any failed                                       failed
    else, if any succeeded (others were cancelled on request) succeeded
    else                                                      cancelled
    ========================================================  =========
    """
    order: tuple[State, ...] = ("running", "pending", "unknown", "failed", "succeeded")
    return next((state for state in order if state in states), "cancelled")


def view_replica(evidence: Evidence) -> ReplicaView:
    """What ``status`` shows of one rank."""
    state = _state(evidence)
    ended = state in TERMINAL_STATES
    beat: Mapping[str, Any] = evidence.heartbeat or {}
    outcome: Mapping[str, Any] = (evidence.outcome if ended else None) or {}
    polled = evidence.polled
    waiting = () if ended else tuple(beat.get("waiting_for") or ())
    return ReplicaView(
        rank=evidence.rank,
        attempt=evidence.attempt,
        state=state,
        phase=None if ended else _phase(beat),
        reason=_reason(state, polled, outcome),
        exit_code=_exit_code(polled, outcome) if ended else None,
        error=None if state == "succeeded" else _error(polled, outcome),
        round=beat.get("round"),
        step=beat.get("step"),
        inner_step=beat.get("inner_step"),
        tokens=beat.get("tokens"),
        tokens_per_s=None if ended else beat.get("tokens_per_s"),
        loss=beat.get("loss"),
        heartbeat_age_s=evidence.heartbeat_age_s,
        waiting_for=waiting,
        excluded=beat.get("excluded"),
        host=beat.get("host"),
        log_tail=evidence.log_tail if state == "failed" else (),
    )


def missing_replicas(views: Sequence[ReplicaView]) -> tuple[tuple[int, str], ...]:
    """Ranks that are not where the others are, and why, in rank order."""
    awaited = {rank for view in views for rank in view.waiting_for}
    found = []
    for view in views:
        why = _why_missing(view, awaited=view.rank in awaited)
        if why is not None:
            found.append((view.rank, why))
    return tuple(found)


def _state(evidence: Evidence) -> State:
    polled = evidence.polled
    if polled is not None and polled != "unknown":
        if polled == "failed" and polled.reason == "lost" and evidence.outcome is not None:
            return _outcome_state(evidence)
        if polled == "failed" and _was_cancelled(evidence, polled.exit_code, polled.reason):
            return "cancelled"
        return str(polled)  # type: ignore[return-value]
    if evidence.outcome is not None:
        return _outcome_state(evidence)
    age = evidence.heartbeat_age_s
    if age is not None:
        return "running" if age <= HEARTBEAT_STALE_S else "unknown"
    if evidence.launched:
        return "unknown"
    return "cancelled" if evidence.cancel_requested else "pending"


def _outcome_state(evidence: Evidence) -> State:
    outcome = evidence.outcome or {}
    if outcome.get("state") == "succeeded":
        return "succeeded"
    if outcome.get("state") == "cancelled":
        return "cancelled"
    if _was_cancelled(evidence, outcome.get("exit_code"), outcome.get("reason")):
        return "cancelled"
    return "failed"


def _was_cancelled(evidence: Evidence, exit_code: int | None, reason: str | None) -> bool:
    ended_by_it = reason in ("cancelled", "lost") or exit_code in _CANCEL_EXIT_CODES
    return evidence.cancel_requested and ended_by_it


def _reason(state: State, polled: ReplicaStatus | None, outcome: Mapping[str, Any]) -> str | None:
    if state == "cancelled":
        return "cancelled"
    if state != "failed":
        return None
    # The provider sees what a killed process can't write: out of memory, preempted, timeout.
    provider = polled.reason if polled is not None else None
    own = outcome.get("reason")
    return (own if provider in (None, "exit_code", "lost") else None) or provider or "exit_code"


def _phase(beat: Mapping[str, Any]) -> str | None:
    phase = beat.get("state")
    return "exiting" if phase in TERMINAL_STATES else phase  # its process hasn't ended yet


def _exit_code(polled: ReplicaStatus | None, outcome: Mapping[str, Any]) -> int | None:
    if polled is not None and polled.exit_code is not None:
        return polled.exit_code
    code = outcome.get("exit_code")
    return code if isinstance(code, int) else None


def _error(polled: ReplicaStatus | None, outcome: Mapping[str, Any]) -> str | None:
    return outcome.get("error") or (polled.message if polled is not None else None) or None


def _why_missing(view: ReplicaView, *, awaited: bool) -> str | None:
    if view.state == "failed":
        return f"failed: {view.error or view.reason}"
    if view.state == "cancelled":
        return "cancelled"
    if view.state == "pending":
        return "not started yet"
    if view.state == "unknown":
        return "cannot be asked, and " + _silence(view)
    if view.state == "running" and not _is_heard(view):
        return _silence(view)
    if view.state == "running" and view.excluded:
        return f"left out: {view.excluded}"
    if view.state == "running" and awaited:
        return f"the others wait for it; it is {view.phase or 'running'}"
    return None


def _takes_part(view: ReplicaView) -> bool:
    return view.state == "running" and _is_heard(view) and view.phase in ("training", "syncing")


def _is_heard(view: ReplicaView) -> bool:
    return view.heartbeat_age_s is not None and view.heartbeat_age_s <= HEARTBEAT_STALE_S


def _silence(view: ReplicaView) -> str:
    if view.heartbeat_age_s is None:
        return "has not been heard from yet"
    return f"silent for {format_duration(view.heartbeat_age_s)}"
