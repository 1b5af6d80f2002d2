"""Who a round waits for, and for how long.

Nothing here is agreed on: whoever first finds its own view satisfied creates the commit, and that
is the decision. What the views are made of is nearly the same everywhere: one listing of the round,
and the standings in the commit before it.

With ``quorum="all"`` a round waits for every rank, as an all-reduce does. Otherwise:

* It waits for its **members**: the replicas that were in the last round, and those that have come
  up to this one since (``join``). One that is going away says so (``away``), and one whose
  heartbeat has stopped, or whose next life is being started, counts as gone; that is asked when
  it is later than it usually is.
* Once a **quorum** is in (half of the members, or the number that was asked for), the others have
  a **grace**: as long as they have usually needed, learnt like TCP's retransmission timeout
  (RFC 6298: mean plus four mean deviations), and at most half a round. A replica that will need
  longer than the time that costs nothing (Decoupled DiLoCo, arXiv:2604.21428, Eq. 3: the slack of
  an overlapped exchange) or next to nothing contributes early, with the steps it has done.
* Half of the members may die at once. The rest go on after a **deadline** of three rounds.
* When nobody of the last round is left, as at the start, everyone who was launched is waited for,
  for the **join deadline**: replicas start minutes apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from diloco_cloud import keys
from diloco_cloud.exchange.history import History
from diloco_cloud.store.base import ObjectInfo

#: What is known of a rank beyond the rounds: launched but not up, heard from, or gone.
Life: TypeAlias = Literal["starting", "alive", "gone"]

#: Part of a round that waiting for the others may cost: in a storm, most rounds have somebody late.
FREE_SHARE: Final = 0.02
#: And part of a heartbeat, where that is longer.
_LEAST_BEATS: Final = 0.2
#: No one is waited for longer than this part of a round once a quorum is in.
_LONGEST_SHARE: Final = 0.5
#: Rounds that a missing quorum is waited for.
_DEADLINE_ROUNDS: Final = 3.0


@dataclass(frozen=True)
class Arrival:
    """A contribution, as the listing of a round shows it."""

    rank: int
    attempt: int
    info: ObjectInfo


@dataclass(frozen=True)
class Attendance:
    """What one listing of a round says.

    Attributes:
        decided: there is a commit.
        arrived: by rank, the contribution of its newest life that made one.
        leaving: ranks that have finished.
        joined, away: ranks whose newest life has come up to this round, or ended.
        newest: by rank, the newest life that has left any word here.
    """

    decided: bool
    arrived: Mapping[int, Arrival]
    leaving: frozenset[int]
    joined: frozenset[int]
    away: frozenset[int]
    newest: Mapping[int, int]

    @classmethod
    def of(
        cls,
        listed: Sequence[ObjectInfo],
        round_: int,
        fragment: int,
        history: History | None = None,
    ) -> Attendance:
        """Read a listing of the round's directory.

        Args:
            listed: everything in it.
            round_: which round it is.
            fragment: whose turn it is.
            history: the decisions before it; lives older than those in it are not heard.
        """
        directory = keys.directory(round_, fragment)
        arrived: dict[int, Arrival] = {}
        words: dict[int, tuple[int, set[str]]] = {}
        for info in listed:
            part = keys.parse_part(info.key, directory)
            if part is None:
                continue
            kind, rank, attempt = part
            if history is not None and attempt < history.attempt_of(rank):
                continue
            if kind == "put" and (rank not in arrived or arrived[rank].attempt <= attempt):
                arrived[rank] = Arrival(rank, attempt, info)
            newest, kinds = words.get(rank, (-1, set()))
            if attempt > newest:
                newest, kinds = attempt, set()
            if attempt == newest:
                kinds.add(kind)
            words[rank] = (newest, kinds)

        def ranks(kind: str) -> frozenset[int]:
            return frozenset(rank for rank, (_, kinds) in words.items() if kind in kinds)

        commit = keys.commit(round_, fragment)
        decided = any(info.key == commit for info in listed)
        leaving, away = ranks("leave"), ranks("away")
        return cls(
            decided=decided,
            arrived={rank: one for rank, one in arrived.items() if rank not in leaving},
            leaving=leaving,
            joined=ranks("join") - away,
            away=away - arrived.keys(),
            newest={rank: newest for rank, (newest, _) in words.items()},
        )


@dataclass
class Lateness:
    """How late a replica usually is, in seconds after the quorum (RFC 6298, section 2)."""

    mean: float
    deviation: float

    @classmethod
    def first(cls, seconds: float) -> Lateness:
        return cls(seconds, seconds / 2)

    def add(self, seconds: float) -> None:
        self.deviation += (abs(self.mean - seconds) - self.deviation) / 4
        self.mean += (seconds - self.mean) / 8

    def back_off(self, longest: float) -> None:
        """Allow for twice the deviation, at most ``longest`` seconds."""
        self.deviation = min(max(2 * self.deviation, 1e-3), max(longest, self.deviation))

    @property
    def allowance(self) -> float:
        """Seconds after which it is later than it usually is."""
        return self.mean + 4 * self.deviation


@dataclass
class Membership:
    """The rules by which this replica sees a round as complete, and what it has learnt for them.

    Attributes:
        world_size: ranks that were launched with the run.
        quorum: "all" ranks; or contributions without which no round is decided; or None, for
            half of those that are there.
        grace_s: seconds to wait for the others after a quorum; None: learnt.
        overlap_s: seconds of training that an exchange runs beside.
        roster: what is known of ranks beyond the rounds; asked rarely, as it costs requests.
    """

    world_size: int
    quorum: int | Literal["all"] | None = "all"
    grace_s: float | None = None
    overlap_s: float = 0.0
    heartbeat_s: float = 5.0
    roster: Callable[[], Mapping[int, Life]] = dict
    _lateness: dict[int, Lateness] = field(default_factory=dict, init=False)
    _asked_at: float | None = field(default=None, init=False)
    _exchange_s: float = field(default=0.0, init=False)
    round_s: float | None = field(default=None, init=False)

    def is_gone(self, rank: int, now: float) -> bool:
        """Whether a rank is known to be gone; asks once per heartbeat, False in between.

        Args:
            rank: whose life it is about.
            now: seconds, monotonic.
        """
        if self._asked_at is not None and now - self._asked_at < self.heartbeat_s:
            return False
        self._asked_at = now
        return self.roster().get(rank) == "gone"

    @property
    def is_strict(self) -> bool:
        """Whether every rank is needed."""
        return self.quorum == "all"

    def expected(
        self, seen: Attendance, history: History, lives: Mapping[int, Life], *, cold: bool
    ) -> set[int]:
        """Ranks whose contribution, or leave, this round waits for.

        Args:
            seen: the round's listing.
            history: the decisions before it.
            lives: what the roster says, where it was asked.
            cold: see :meth:`is_cold`.
        """
        everyone = set(range(self.world_size))
        gone = set(history.finished) | seen.leaving
        if self.is_strict:
            return everyone - gone
        members = set(history.members) if history.standings else everyone
        if cold:
            members |= {rank for rank, life in lives.items() if life == "starting"}
            silent = {rank for rank, life in lives.items() if life == "gone"}
        else:
            silent = {rank for rank, life in lives.items() if life != "alive"}
        return (members | seen.joined) - silent - gone - seen.away

    def is_cold(self, seen: Attendance, history: History) -> bool:
        """Whether nobody who is here was in the last round: all begin, or all begin again."""
        return not any(history.is_member(one.rank, one.attempt) for one in seen.arrived.values())

    def needed(self, seen: Attendance, expected: set[int], history: History) -> int:
        """Contributions that make a quorum."""
        there = expected | seen.arrived.keys()
        if self.quorum == "all":
            return len(there)
        if self.quorum is None:
            return max(1, -(-len(there) // 2))
        # Not those of a run that has been resumed with fewer.
        known = set(range(self.world_size)) | there
        return min(self.quorum, len(known - set(history.finished) - seen.leaving))

    # -- waiting -------------------------------------------------------------------------------

    @property
    def slack_s(self) -> float:
        """Seconds that waiting costs nothing, because training goes on meanwhile.

        Decoupled DiLoCo, arXiv:2604.21428, Eq. 3: the overlapped steps' time, less the time to the
        quorum and that of the transfers.
        """
        return max(0.0, self.overlap_s - self._exchange_s)

    @property
    def free_s(self) -> float:
        """Seconds that waiting for a late replica may take without costing much."""
        if self.grace_s is not None:
            return self.grace_s
        # Runs of rounds shorter than their jitter exist: trials, and tests.
        least = _LEAST_BEATS * self.heartbeat_s
        return max(self.slack_s, FREE_SHARE * (self.round_s or 0.0), least)

    def usual_s(self, missing: set[int], *, pace_s: float) -> float:
        """Seconds after the quorum within which ``missing`` have usually come.

        Args:
            missing: ranks that are expected and not there.
            pace_s: how long this replica trained for the round; stands in for what is not known.
        """
        if self.grace_s is not None:
            return self.grace_s
        longest = max(_LONGEST_SHARE * (self.round_s or pace_s), self.free_s)
        usual = (
            self._lateness[rank].allowance if rank in self._lateness else longest
            for rank in missing
        )
        return min(max(usual, default=0.0), longest)

    def grace(self, missing: set[int], *, pace_s: float) -> float:
        """Seconds to wait for ``missing`` after the quorum; arguments as of :meth:`usual_s`."""
        usual = self.usual_s(missing, pace_s=pace_s)
        return usual if self.grace_s is not None else usual + self.free_s

    def deadline_s(self, pace_s: float, timeout_s: float) -> float:
        """Seconds after which a quorum is no longer waited for."""
        usual = _DEADLINE_ROUNDS * max(self.round_s or 0.0, pace_s) + self.free_s
        return min(max(usual, 2 * self.heartbeat_s), timeout_s)

    def learn(
        self,
        seen: Attendance,
        history: History,
        needed: int,
        round_s: float,
        exchange_s: float = 0.0,
    ) -> None:
        """Take in how a round went; nothing is learnt from one in which all began.

        Args:
            seen: its last listing.
            history: the decisions before it.
            needed: how many made its quorum.
            round_s: seconds since the decision before it.
            exchange_s: seconds to its quorum, and those that this replica's transfers took.
        """
        if self.is_cold(seen, history):
            return
        self._exchange_s += (exchange_s - self._exchange_s) / 2
        if self.round_s is None:
            self.round_s = round_s
        else:
            self.round_s += (round_s - self.round_s) / 4
        times = sorted(one.info.last_modified for one in seen.arrived.values())
        if not times:
            return
        quorum_at = times[min(needed, len(times)) - 1]
        for rank, one in seen.arrived.items():
            late = max(0.0, one.info.last_modified - quorum_at)
            if rank in self._lateness:
                self._lateness[rank].add(late)
            else:
                self._lateness[rank] = Lateness.first(late)
        for rank in self._lateness.keys() & set(history.members) - seen.arrived.keys():
            # Missed: it was later than it usually is, by an amount that is not known.
            self._lateness[rank].back_off(self.round_s)

    def closes(self, seen: Attendance, history: History, remaining_s: float) -> bool:
        """Whether a replica that is still training should contribute what it has.

        Args:
            seen: the open round's listing.
            history: the decisions before it.
            remaining_s: seconds until it would contribute by itself.
        """
        if self.is_strict:
            return False
        if seen.decided:
            return True
        if remaining_s <= self.free_s or self.is_cold(seen, history):
            return False
        expected = self.expected(seen, history, {}, cold=False)
        return len(seen.arrived) >= self.needed(seen, expected, history)
