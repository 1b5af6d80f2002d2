"""What ``status`` shows of one replica, as a pure function of what is known about it.

Who decides, for the newest life of a rank:

1. The executor's ``poll``, whenever it can be asked. One exception: "lost" (the provider has
   forgotten the job) yields to an outcome, which is the replica's own last word.
2. The outcome that the replica wrote when it ended.
3. The heartbeat: a fresh one means running.
4. Otherwise the state is unknown; or pending, if nothing was launched yet.

A replica that was killed after its cancellation had been asked for is cancelled, not failed. One
that a supervisor has ended because it stood still has failed, and is worth another try: to its
executor it was cancelled, and it may itself have said that it was preempted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_cloud.executor import TERMINAL_STATES, ReplicaStatus, State
from diloco_cloud.run.durations import format_duration
from diloco_cloud.run.restart import ABANDONED_S, is_restartable
from diloco_cloud.run.status import ReplicaView

#: Ends of a process that a cancellation brings about: by signal, or the shell's code for one.
_CANCEL_EXIT_CODES = frozenset({-2, -9, -15, 130, 137, 143})
#: A replica whose handle nobody has can never be asked: after so many times the silence that makes
#: another one's state unknown, it is given up.
_LOST_TIMES = 10
#: Seconds without a step that are worth a word.
_STANDING_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known of the newest life of one rank.

    Attributes:
        backend: where it runs.
        launched: the executor returned a handle.
        polled: the executor's answer; None if it could not be asked.
        outcome: the replica's last word, as it wrote it.
        heartbeat: the replica's newest sign of life in this life.
        heartbeat_age_s: by the store's clock.
        stale_s: seconds of silence after which a replica is no longer taken to be running.
        intent: what its starter wrote before it was started.
        intent_age_s: since the starter last said that it is at it; None where it is not needed.
        stopped: what a supervisor wrote that will not start it again.
        hung: what a supervisor wrote that had this life ended because it stood still.
        cancel_requested: a user asked for this life to end.
        restarts: lives before this one.
        participation, merged: see :class:`ReplicaView`.
        retired: its rank is beyond the run's size.
    """

    rank: int
    attempt: int = 0
    backend: str | None = None
    launched: bool = False
    polled: ReplicaStatus | None = None
    outcome: Mapping[str, Any] | None = None
    heartbeat: Mapping[str, Any] | None = None
    heartbeat_age_s: float | None = None
    stale_s: float = 60.0
    intent: Mapping[str, Any] | None = None
    intent_age_s: float | None = None
    stopped: Mapping[str, Any] | None = None
    hung: Mapping[str, Any] | None = None
    cancel_requested: bool = False
    restarts: int = 0
    participation: float | None = None
    merged: int | None = None
    retired: bool = False


def view_replica(evidence: Evidence) -> ReplicaView:
    """What ``status`` shows of one rank."""
    state = _state(evidence)
    ended = state in TERMINAL_STATES
    beat: Mapping[str, Any] = evidence.heartbeat or {}
    outcome = evidence.outcome if ended else None
    polled = evidence.polled
    reason = _reason(state, evidence)
    exit_code = _exit_code(polled, outcome or {}) if ended else None
    restartable = state == "failed" and is_restartable(reason, exit_code, outcome)
    return ReplicaView(
        rank=evidence.rank,
        attempt=evidence.attempt,
        state=state,
        backend=evidence.backend,
        phase=None if ended else _phase(beat),
        reason=reason,
        exit_code=exit_code,
        error=None if state == "succeeded" else _error(reason, evidence, outcome or {}),
        round=beat.get("round"),
        step=beat.get("step"),
        inner_step=beat.get("inner_step"),
        tokens=beat.get("tokens"),
        tokens_per_s=None if ended else beat.get("tokens_per_s"),
        idle_s=None if ended else beat.get("idle_s"),
        loss=beat.get("loss"),
        reward=beat.get("reward"),
        heartbeat_age_s=evidence.heartbeat_age_s,
        alive=state == "running" and _is_fresh(evidence),
        participation=evidence.participation,
        merged=evidence.merged,
        waiting_for=() if ended else tuple(beat.get("waiting_for") or ()),
        excluded=beat.get("excluded"),
        restarts=evidence.restarts,
        restarted_after=(evidence.intent or {}).get("after"),
        restartable=restartable,
        given_up=(evidence.stopped or {}).get("reason") if restartable else None,
        starting_s=evidence.intent_age_s if state == "pending" else None,
        launched=evidence.launched,
        retired=evidence.retired,
        host=beat.get("host"),
    )


def missing_replicas(views: Sequence[ReplicaView]) -> tuple[tuple[int, str], ...]:
    """Ranks that are not where the others are, and why, in rank order."""
    awaited = {rank for view in views for rank in view.waiting_for}
    found = []
    for view in views:
        why = None if view.retired else _why_missing(view, awaited=view.rank in awaited)
        if why is not None:
            found.append((view.rank, why))
    return tuple(found)


def why_ended(view: ReplicaView) -> str:
    """One line on how a replica ended: "preempted, exit code 143: …"."""
    code = "" if view.exit_code is None else f"exit code {view.exit_code}"
    reason = "" if view.reason in (None, "exit_code") else str(view.reason).replace("_", " ")
    said = ", ".join(part for part in (reason, code) if part)
    return ": ".join(part for part in (said, view.error) if part) or "unknown"


def _state(evidence: Evidence) -> State:
    state = _told_state(evidence)
    is_hung = evidence.hung is not None and not evidence.cancel_requested
    return "failed" if state == "cancelled" and is_hung else state


def _told_state(evidence: Evidence) -> State:
    """The state as executor, replica and user have it."""
    polled = evidence.polled
    if polled is not None and polled != "unknown":
        if polled == "failed" and polled.reason == "lost" and evidence.outcome is not None:
            return _outcome_state(evidence)
        if polled == "failed" and _was_cancelled(evidence, polled.exit_code, polled.reason):
            return "cancelled"
        return str(polled)  # type: ignore[return-value]
    if evidence.outcome is not None:
        return _outcome_state(evidence)
    if evidence.heartbeat_age_s is not None:
        return _state_by_heartbeat(evidence)
    if evidence.launched:
        return "unknown"
    return "cancelled" if evidence.cancel_requested else "pending"


def _state_by_heartbeat(evidence: Evidence) -> State:
    if _is_fresh(evidence):
        return "running"
    silence = evidence.heartbeat_age_s or 0.0
    if not evidence.launched and silence > _LOST_TIMES * evidence.stale_s:
        return "cancelled" if evidence.cancel_requested else "failed"
    return "unknown"


def _is_fresh(evidence: Evidence) -> bool:
    age = evidence.heartbeat_age_s
    return age is not None and age <= evidence.stale_s


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
    """Whether a failed life counts as cancelled: it died of it, or is not to be started again."""
    ended_by_it = reason == "cancelled" or exit_code in _CANCEL_EXIT_CODES
    restartable = is_restartable(reason, exit_code, evidence.outcome)
    return evidence.cancel_requested and (ended_by_it or restartable)


def _erred(evidence: Evidence) -> bool:
    """Whether a life ended by an error of its own, though somebody had begun to end it."""
    outcome = evidence.outcome or {}
    told = outcome.get("state") == "failed"
    return told and not is_restartable(outcome.get("reason"), outcome.get("exit_code"), outcome)


def _reason(state: State, evidence: Evidence) -> str | None:
    if state == "cancelled":
        return "cancelled"
    if state != "failed":
        return None
    if evidence.hung is not None and not _erred(evidence):
        return "hung"
    if not evidence.launched and evidence.outcome is None and evidence.polled is None:
        return "lost"
    # The provider sees what a killed process can't write: out of memory, preempted, timeout.
    provider = evidence.polled.reason if evidence.polled is not None else None
    own = (evidence.outcome or {}).get("reason")
    return (own if provider in (None, "exit_code", "lost") else None) or provider or "exit_code"


def _phase(beat: Mapping[str, Any]) -> str | None:
    phase = beat.get("state")
    return "exiting" if phase in TERMINAL_STATES else phase  # its process hasn't ended yet


def _exit_code(polled: ReplicaStatus | None, outcome: Mapping[str, Any]) -> int | None:
    if polled is not None and polled.exit_code is not None:
        return polled.exit_code
    code = outcome.get("exit_code")
    return code if isinstance(code, int) else None


def _error(reason: str | None, evidence: Evidence, outcome: Mapping[str, Any]) -> str | None:
    if reason == "hung" and evidence.hung is not None:
        return str(evidence.hung.get("error"))  # what it says itself came of its being ended
    polled = evidence.polled
    return outcome.get("error") or (polled.message if polled is not None else None) or None


def _why_missing(view: ReplicaView, *, awaited: bool) -> str | None:
    if view.state == "failed":
        return f"failed: {view.error or view.reason}"
    if view.state == "cancelled":
        return "cancelled"
    if view.state == "pending":
        return _why_pending(view)
    if view.state == "unknown":
        return "cannot be asked, and " + _silence(view)
    if view.state == "running" and not view.alive:
        return _silence(view)
    if view.state == "running" and view.excluded:
        return f"left out: {view.excluded}"
    if view.state == "running" and awaited:
        return f"the others wait for it; it is {view.phase or 'running'}{_standing(view)}"
    return None


def _standing(view: ReplicaView) -> str:
    if view.phase != "training" or (view.idle_s or 0.0) < _STANDING_S:
        return ""
    return f", and has made no step for {format_duration(view.idle_s or 0.0)}"


def _why_pending(view: ReplicaView) -> str:
    if view.starting_s is not None and view.starting_s > ABANDONED_S:
        return f"its start was abandoned {format_duration(view.starting_s)} ago"
    return "not started yet"


def _silence(view: ReplicaView) -> str:
    if view.heartbeat_age_s is None:
        return "has not been heard from yet"
    return f"silent for {format_duration(view.heartbeat_age_s)}"
