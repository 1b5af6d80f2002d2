"""Where a replica dies: at a request of a certain kind, made in a certain role.

A run's traps are set in every process of it. Whoever walks into one first and gets to create its
claim, a file that can be created once, dies of SIGKILL before, after or half-way through the
request; the others go on.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from forked_run import Board, Companion

from diloco_cloud import keys
from diloco_cloud.errors import NotFoundError
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.outer import MockManager
from diloco_cloud.outer.progress import RoundReport
from diloco_cloud.store.base import ObjectStore

#: plain: none of the others. committer: created the last decision. owner: of a shard. writer: of
#: the snapshot that the round is followed by. any: whoever makes the request.
Role: TypeAlias = Literal["plain", "committer", "owner", "writer", "any"]
Side: TypeAlias = Literal["before", "halfway", "after"]

_UNTIL_BACK = 1_000_000
#: More than any two replicas can be apart, so that all see the end before they have passed it.
_ROUNDS_ONCE_BACK = 4
_METHODS = frozenset(
    {"create", "put", "get", "get_range", "head", "list", "list_dirs", "delete", "delete_many"}
)


@dataclass(frozen=True)
class Step:
    """A kind of request.

    Attributes:
        phase, name: for the table.
        method, key: of the store; ``key`` is a pattern. "apply" is no request: it is the outer
            step, from the decision's report to the next inner step.
        roles: in which it is made.
        who: makes it, where the role is "any".
        behind: what the life has behind it: nothing at all, its contribution to the round, or also
            the round's decision; "": anything.
        there: only where the object is there (a read that finds nothing is another step).
        lives: how many lives the rank needs to get there: a joiner in mid-run is a second one.
        sharded: only in a sharded reduction.
        streamed: only in an all-gather whose contributions are sent chunk by chunk.
    """

    phase: str
    name: str
    method: str
    key: str = ""
    roles: tuple[Role, ...] = ("any",)
    who: str = "plain"
    behind: Literal["", "nothing", "contribution", "decision"] = ""
    sides: tuple[Side, ...] = ("before", "after")
    there: bool = False
    lives: int = 1
    sharded: bool = False
    streamed: bool = False

    @property
    def is_last(self) -> bool:
        """Whether it comes when there are no rounds any more."""
        return self.phase in ("leave", "export")


@dataclass(frozen=True)
class Trap:
    """Where one process of a run dies.

    Attributes:
        first, last: rounds in which it is set.
        rank: of the victim; None: whoever is in the role.
        attempt: of the victim.
        claim: created by the victim, with what there is to say of its death.
    """

    step: Step
    side: Side
    role: Role
    claim: Path
    first: int = -1
    last: int = 1_000_000
    rank: int | None = None
    attempt: int = 0


@dataclass
class Place:
    """Where a life is in the run, as its own requests tell.

    Attributes:
        contributed: the newest round it contributed to.
        decided: the newest round whose decision it has seen since.
        decider: the newest round that it decided itself.
    """

    rank: int
    attempt: int
    replicas: int
    snapshot_every: int
    contributed: int = -1
    decided: int = -1
    decider: int = -1

    def note(self, method: str, key: str, data: Any) -> None:
        """Take in a request that succeeded."""
        round_ = _round_of(key)
        if round_ is None:
            return
        if method == "create" and "/put/" in key:
            self.contributed = round_
        elif key.endswith("/commit") and method in ("create", "get"):
            if method == "create":
                self.decider = round_
            if round_ == self.contributed:
                self.decided = round_

    def is_in(self, role: Role, round_: int, decided: Commit | None) -> bool:
        """Whether this life has a role in a round.

        Args:
            role: which.
            round_: the round it is at.
            decided: its decision, where there is one.
        """
        last = round_ if self.decided == round_ else round_ - 1
        turn, late = divmod(round_ + 1, self.snapshot_every)
        writer = late == 0 and turn % self.replicas == self.rank
        owner = decided is not None and self.rank < decided.shards
        return {
            "any": True,
            "plain": not writer and not owner and self.decider != last,
            "committer": self.decider == last,
            "owner": owner,
            "writer": writer,
        }[role]


def _round_of(key: str) -> int | None:
    return keys.round_of(key.removeprefix(keys.ROUNDS)) if key.startswith(keys.ROUNDS) else None


class Tripwire(Companion):
    """Kills the processes that walk into a run's traps.

    A run with a death goes on until whoever died has been in a round again.

    Args:
        traps: of the run.
        replicas: of the run.
        snapshot_every: rounds between two snapshots.
    """

    def __init__(self, traps: Sequence[Trap], *, replicas: int, snapshot_every: int) -> None:
        self._traps, self._replicas, self._snapshot_every = traps, replicas, snapshot_every
        #: Of the run, to note what the survivors' rules say at the moment of a death.
        self.board: Board | None = None
        self._watched: _WatchedStore | None = None

    def store(self, inner: ObjectStore, rank: int, attempt: int) -> ObjectStore:
        place = Place(rank, attempt, self._replicas, self._snapshot_every)
        assert self.board is not None
        self._watched = _WatchedStore(inner, self._traps, place, self.board)
        return self._watched  # type: ignore[return-value]  # it passes every method on

    def on_round(self, report: RoundReport) -> None:
        assert self._watched is not None
        self._watched.end_soon(report.round)
        self._watched.meet("apply", "", "before")

    def on_step(self, manager: MockManager) -> None:
        assert self._watched is not None
        self._watched.meet("apply", "", "after")


@dataclass
class _WatchedStore:
    """The store of one life."""

    _inner: ObjectStore
    _traps: Sequence[Trap]
    _place: Place
    _board: Board
    _commit: Commit | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._watch(name, found) if name in _METHODS else found

    def _watch(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            many = list(args[0]) if name == "delete_many" else []
            key = str((many or [""])[0] if name == "delete_many" else args[0] if args else "")
            self.meet(name, key, "before")
            if many:
                if self._finds(name, key, "halfway"):
                    method(many[: len(many) // 2])
                    self.meet(name, key, "halfway")
                args = (many,)
            result = method(*args)
            data = result if name == "get" else args[-1]
            with self._lock:
                self._place.note(name, key, data)
                if key.endswith("/commit") and name in ("create", "get"):
                    self._commit = Commit.decode(bytes(data))
            self.meet(name, key, "after")
            return result

        return call

    def meet(self, method: str, key: str, side: Side) -> None:
        """Die if there is a trap here that nobody else has walked into."""

        def others(values: Sequence[float]) -> list[float]:
            return [value for rank, value in enumerate(values) if rank != self._place.rank]

        for trap in self._found(method, key, side):
            try:
                claim = os.open(trap.claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                continue
            death = {
                "rank": self._place.rank,
                "attempt": self._place.attempt,
                "round": self._now(method, key),
                "key": key,
                "at": time.time(),
                "deadline_s": max(others(self._board.deadline_s)),
                "round_s": max(others(self._board.round_s)),
            }
            os.write(claim, json.dumps(death).encode())
            if not trap.step.is_last:
                self._board.rounds.value = _UNTIL_BACK
            os.kill(os.getpid(), signal.SIGKILL)

    def end_soon(self, round_: int) -> None:
        """A later life of who died is back in a round: the run may end."""
        if self._place.attempt > 0 and self._board.rounds.value == _UNTIL_BACK:
            self._board.rounds.value = round_ + _ROUNDS_ONCE_BACK

    def _finds(self, method: str, key: str, side: Side) -> bool:
        return bool(self._found(method, key, side))

    def _found(self, method: str, key: str, side: Side) -> list[Trap]:
        return [trap for trap in self._traps if self._is_here(trap, method, key, side)]

    def _now(self, method: str, key: str) -> int:
        """The round that this life is at."""
        of_key = None if method.startswith("delete") else _round_of(key)
        return self._place.contributed if of_key is None else of_key

    def _is_here(self, trap: Trap, method: str, key: str, side: Side) -> bool:
        step, place, now = trap.step, self._place, self._now(method, key)
        if (method, side, place.attempt) != (step.method, trap.side, trap.attempt):
            return False
        if trap.rank not in (None, place.rank) or not re.fullmatch(step.key, key):
            return False
        if not trap.first <= now <= trap.last:
            return False
        if step.behind == "nothing" and place.contributed >= 0:
            return False
        if step.behind in ("contribution", "decision") and place.contributed != now:
            return False
        if step.behind == "decision" and place.decided != now:
            return False
        # In a sharded run everybody who owned a shard last time will own one again.
        if not place.is_in(trap.role, now, self._commit) or trap.claim.exists():
            return False
        return not step.there or self._is_there(key)

    def _is_there(self, key: str) -> bool:
        try:
            self._inner.head(key)
        except NotFoundError:
            return False
        return True
