"""What ``status`` tells of a run, and what the run's state is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_cloud.executor import TERMINAL_STATES, State


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """One replica, as ``status`` shows it.

    Attributes:
        backend: where its newest life runs.
        phase: what it was doing at its last heartbeat: starting, joining, training, syncing, …
        round: rounds agreed so far.
        step: outer steps committed.
        alive: it runs, and its heartbeat is fresh.
        participation: share of the kept rounds that it was averaged in; None without any round.
        idle_s: seconds since its last inner step or change of phase, at its last heartbeat and by
            its own clock; None once it has ended.
        loss: as the trainer last reported it; of the composer, of all its channels.
        reward: mean of the rollouts at the trainer's last log; None where there are none.
        merged: tokens whose work is in the global parameters.
        waiting_for: ranks whose contribution it was waiting for.
        excluded: why the others left it out of a round, or None.
        restarts: how often it was started again.
        restarted_after: why its life before this one ended.
        restartable: it failed, and not by an error of its own: a supervisor would start it again.
        given_up: why a supervisor does not.
        starting_s: seconds since somebody last worked at starting it; None once it is launched.
        launched: its executor has returned a handle.
        retired: the run goes on with fewer replicas, and without this one.
        error: one line, or None.
    """

    rank: int
    attempt: int
    state: State
    backend: str | None = None
    phase: str | None = None
    reason: str | None = None
    exit_code: int | None = None
    error: str | None = None
    round: int | None = None
    step: int | None = None
    inner_step: int | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    idle_s: float | None = None
    loss: float | None = None
    reward: float | None = None
    heartbeat_age_s: float | None = None
    alive: bool = False
    participation: float | None = None
    merged: int | None = None
    waiting_for: tuple[int, ...] = ()
    excluded: str | None = None
    restarts: int = 0
    restarted_after: str | None = None
    restartable: bool = False
    given_up: str | None = None
    starting_s: float | None = None
    launched: bool = False
    retired: bool = False
    host: str | None = None
    log_tail: tuple[str, ...] = ()

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL_STATES


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """One run, as ``status`` shows it.

    Three figures that are not the same thing: *liveness* (``alive``) is who is heard of,
    *participation* (of each replica) is who gets into rounds, and *breadth* is how many replicas
    an average is made of.

    Attributes:
        backend: that the run was launched on; where that was a fleet, its first, or the one that
            was chosen from it.
        backends: where its replicas are, in the order of ranks; without those that have retired.
        state: see :func:`run_state`.
        replicas: by rank, all that there ever were.
        size: how many the run has now: those with ranks from ``size`` on have retired.
        alive: ranks whose heartbeat is fresh.
        breadth: replicas averaged in each of the kept rounds, on average; None without a round.
        rounds_kept: committed rounds that participation and breadth are taken over.
        excluded: the newest exclusion of each rank in those rounds: rank, attempt, round, reason.
        round: rounds that the furthest replica has agreed on; None before the first heartbeat.
        rounds: how many there will be, over all fragments; None if the trainer decides.
        over: some replica could be started again, and is not, as the result is there already.
        supervised: a supervisor has looked at the run within the last minute.
        missing: ranks that are not where the others are, and why.
        last_commit: round, fragment, decision, contributors and excluded of the newest commit.
        reducers: volunteer reducers that the run was launched with.
        reducers_alive: how many of them give signs of life.
        note: why an executor could not be asked, where one could not.
    """

    run_id: str
    backend: str
    state: State
    replicas: tuple[ReplicaView, ...]
    size: int
    round: int | None
    rounds: int | None
    missing: tuple[tuple[int, str], ...]
    created_at: float
    backends: tuple[str, ...] = ()
    alive: tuple[int, ...] = ()
    breadth: float | None = None
    rounds_kept: int = 0
    excluded: tuple[Mapping[str, Any], ...] = ()
    over: bool = False
    supervised: bool = False
    last_commit: Mapping[str, Any] | None = None
    reducers: int = 0
    reducers_alive: int = 0
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


def places(views: Sequence[ReplicaView]) -> tuple[str, ...]:
    """The backends of replicas that have not retired, each once, in the order of ranks."""
    backends = (view.backend for view in views if not view.retired)
    return tuple(dict.fromkeys(backend for backend in backends if backend is not None))


def counted_states(views: Sequence[ReplicaView], *, over: bool, supervised: bool) -> list[State]:
    """The states that the run's state is made of.

    They are the replicas' own, with three exceptions. A retired replica counts only while it still
    runs. One that is about to be started again is pending. And one that its machine took counts as
    succeeded where the run has got to its end without it: all that was asked for is there.

    Args:
        views: of all replicas.
        over: the result of the last round is there.
        supervised: somebody starts again what can be.
    """
    states: list[State] = []
    for view in views:
        if view.retired and view.state not in ("running", "pending"):
            continue
        if view.restartable and over:
            states.append("succeeded")
        elif view.restartable and supervised and view.given_up is None:
            states.append("pending")
        else:
            states.append(view.state)
    return states


def is_over(
    views: Sequence[ReplicaView], manifest: Mapping[str, Any] | None, rounds: int | None
) -> bool:
    """Whether the run has got to its end, so that to start a replica again is pointless.

    Without a result it has not, even if all others have succeeded: a replica may have died while
    it was writing it, and its next life will. Nor with one that was written while others went on,
    unless all rounds are in it.

    Args:
        views: of all replicas.
        manifest: of the exported result; None if there is none.
        rounds: that the run was to have, over all fragments; None if the trainer decides.
    """
    if manifest is None:
        return False
    if is_whole(manifest, rounds):
        return True
    if manifest.get("final") is False:
        return False
    others = [view.state for view in views if not view.restartable and not view.retired]
    return {"succeeded", "cancelled"}.issuperset(others)


def is_whole(manifest: Mapping[str, Any], rounds: int | None) -> bool:
    """Whether an exported result has all the rounds that there will be.

    Args:
        manifest: of the result.
        rounds: that the run was to have, over all fragments; None if the trainer decides: then it
            is whole unless others went on when it was written.
    """
    reached = manifest.get("round")
    if rounds is None:
        return manifest.get("final") is not False
    return isinstance(reached, int) and reached >= rounds


def _takes_part(view: ReplicaView) -> bool:
    return view.alive and view.phase in ("training", "syncing")
