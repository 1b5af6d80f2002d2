"""Agreeing on a round through nothing but create-once.

Every replica watches the round's directory (one LIST a look). Whoever first finds its condition
met (:mod:`diloco_cloud.exchange.membership`) computes the decision and tries to create ``commit``;
the store lets exactly one succeed, and the rest read what it wrote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

from diloco_cloud import keys
from diloco_cloud.errors import (
    AlreadyExistsError,
    CorruptContributionError,
    DilocoError,
    ExchangeError,
    ForeignObjectError,
    MissedRoundError,
    NotFoundError,
    RoundTimeoutError,
)
from diloco_cloud.exchange.commit import Commit, Contributor
from diloco_cloud.exchange.contribution import Header
from diloco_cloud.exchange.history import History
from diloco_cloud.exchange.layout import TensorLayout
from diloco_cloud.exchange.membership import Arrival, Attendance, Life, Membership
from diloco_cloud.exchange.payloads import Payloads, read_header
from diloco_cloud.exchange.signing import Signer
from diloco_cloud.exchange.watch import Watch
from diloco_cloud.store.base import ObjectStore

#: Who lives is asked anew after this part of a wait, but not within a heartbeat.
_ASKING_SHARE: Final = 0.1


def newer_snapshots(store: ObjectStore, round_: int) -> int:
    """Snapshots, whole or not, of states that include a round; 2 where the round may be deleted."""
    numbers = map(keys.snapshot_number, store.list_dirs(keys.STATE))
    return sum(number is not None and number > round_ for number in numbers)


def may_be_deleted(store: ObjectStore, round_: int) -> bool:
    """Whether what is missing of a round may have been deleted, now that nobody needs it.

    A round goes once there is a snapshot of a state that includes it; in a run without snapshots,
    once the next one is decided. Objects go one by one, so the decision may be there yet. Asked
    after something was found missing, and before whether the decision is there: then one of the two
    tells.
    """
    if newer_snapshots(store, round_):
        return True
    return any(keys.is_commit(info.key) for info in store.list(keys.round_prefix(round_ + 1)))


def raise_if_superseded(rank: int, attempt: int, newest: int) -> None:
    """Raise ``ExchangeError`` in a life whose rank has a newer one."""
    if newest > attempt:
        raise ExchangeError(
            f"attempt {newest} of replica {rank} has taken over from attempt {attempt}",
            fix="Nothing is lost: this process is no longer needed.",
        )


def read_commit(store: ObjectStore, run: str, round_: int, fragment: int, signer: Signer) -> Commit:
    """The decision of a round.

    Raises:
        NotFoundError: there is none, or it has been deleted.
        CorruptContributionError: what is there is not this round's.
        ForeignObjectError: it is not signed with the run's key.
    """
    key = keys.commit(round_, fragment)
    commit = Commit.decode(store.get(key))
    commit.check(signer, key)
    if (commit.run, commit.round, commit.fragment) != (run, round_, fragment):
        raise CorruptContributionError(f"{key} belongs to another run or round")
    return commit


@dataclass
class Agreement:
    """One replica's view of one round's decision.

    Attributes:
        history: the decisions before this round.
        membership: who is waited for, and for how long.
        own: the header that this replica is in the round with, and its digest; spares reading it
            back. It may be an earlier life's.
        is_own_there: whether the store holds ``own``, and not something damaged in its place.
        attempt: this life.
        pace_s: seconds this replica trained for the round.
        timeout_s: how long to wait for ranks that have begun.
        join_timeout_s: how long to wait for the others when all begin.
        waiting_for: called with the ranks that are missing, whenever that changes.
        payloads: what was read of the peers' contributions before the decision.
        decide: the decision that follows from headers, who leaves, and whose is damaged.
        layout: of the tensors, where this life knows them.
    """

    store: ObjectStore
    run: str
    round: int
    fragment: int
    history: History
    membership: Membership
    own: tuple[Header, str]
    attempt: int
    payloads: Payloads
    decide: Callable[..., Commit]
    is_own_there: bool = True
    layout: TensorLayout | None = None
    pace_s: float = 0.0
    timeout_s: float = 1800.0
    join_timeout_s: float = 1800.0
    waiting_for: Callable[[list[int]], None] = lambda _missing: None
    seen: Attendance | None = field(default=None, init=False)
    needed: int = field(default=1, init=False)
    _lives: Mapping[int, Life] = field(default_factory=dict, init=False)
    _asked_at: float | None = field(default=None, init=False)
    quorum_at: float | None = field(default=None, init=False)
    _missing: set[int] | None = field(default=None, init=False)

    def reach(self, watch: Watch) -> Commit:
        """Wait for the decision, and make it if nobody has.

        Raises:
            RoundTimeoutError: too few came within the watch's time.
            MissedRoundError: the round was decided and deleted long ago.
            ExchangeError: another life of this rank has taken over.
        """
        while True:
            self.seen = seen = self._look()
            if seen.decided:
                return self._undisputed(self._read())
            if self._is_complete(seen, watch):
                commit = self._create(seen)
                if commit is not None:
                    return commit
                if watch.expired:
                    raise self._nobody_else(watch)
            watch.pause(self._until_next_step(watch))

    def _look(self) -> Attendance:
        listed = self.store.list(keys.directory(self.round, self.fragment))
        seen = Attendance.of(listed, self.round, self.fragment, self.history)
        rank = self.own[0].rank
        raise_if_superseded(rank, self.attempt, seen.newest.get(rank, 0))
        return seen

    def _read(self) -> Commit:
        return read_commit(self.store, self.run, self.round, self.fragment, self.payloads.signer)

    # -- whether to go on waiting --------------------------------------------------------------

    def _is_complete(self, seen: Attendance, watch: Watch) -> bool:
        """Whether the round can be decided as things stand.

        Raises:
            RoundTimeoutError: it cannot, and has been waited for long enough.
        """
        rules = self.membership
        waited = watch.waited_s
        cold = rules.is_cold(seen, self.history) and waited < self.join_timeout_s
        self._ask_around(watch, cold=cold)
        expected = rules.expected(seen, self.history, self._lives, cold=cold)
        missing = expected - seen.arrived.keys()
        self.needed = rules.needed(seen, expected, self.history)
        enough = len(seen.arrived) >= self.needed
        if enough and not missing:
            return True
        self._tell(missing)
        if rules.is_strict:
            self._raise_if_hopeless(missing, watch)
            return False
        if enough and not cold:
            if self.quorum_at is None:
                self.quorum_at = watch.clock.now()
            return self._overdue_s(watch, self._grace_s) >= 0.0
        self.quorum_at = None
        limit = rules.deadline_s(self.pace_s, self.timeout_s)
        if rules.quorum is None and not cold and waited >= limit:
            return True
        if watch.expired:
            raise self._timeout(missing, watch)
        return False

    @property
    def _usual_s(self) -> float:
        return self.membership.usual_s(self._missing or set(), pace_s=self.pace_s)

    @property
    def _grace_s(self) -> float:
        return self.membership.grace(self._missing or set(), pace_s=self.pace_s)

    def _overdue_s(self, watch: Watch, allowed_s: float) -> float:
        """Seconds that the quorum has been in for longer than so many; negative before it is."""
        if self.quorum_at is None:
            return -math.inf
        return watch.clock.now() - self.quorum_at - allowed_s

    def _until_next_step(self, watch: Watch) -> float | None:
        """Seconds until the missing are late, or until they are waited for no more."""
        if self.quorum_at is None:
            return None
        late = self._overdue_s(watch, self._usual_s)
        return -late if late < 0.0 else max(0.0, -self._overdue_s(watch, self._grace_s))

    def _tell(self, missing: set[int]) -> None:
        if missing != self._missing:
            self._missing = missing
            self.waiting_for(sorted(missing))

    def _ask_around(self, watch: Watch, *, cold: bool) -> None:
        """Look beyond the round, now and then: who lives, and whether the run has moved on."""
        if self.membership.is_strict:
            return
        now = watch.clock.now()
        # Each time is three requests, and the longer nothing has happened, the less is new.
        period = max(self.membership.heartbeat_s, _ASKING_SHARE * watch.waited_s)
        if self._asked_at is not None:
            is_due = now - self._asked_at >= period
        else:
            # From here on, waiting for one that is dead would hold up everybody else.
            is_late = self._overdue_s(watch, self._usual_s) >= 0.0
            is_due = cold or is_late or watch.waited_s >= self.membership.heartbeat_s
        if not is_due:
            return
        self._asked_at = now
        self._lives = self.membership.roster()
        self._raise_if_behind()

    def _raise_if_behind(self) -> None:
        """A round that was decided and deleted looks like one that is still open.

        But the outer state of a later round is stored before the round is deleted.
        """
        if newer_snapshots(self.store, self.round) == 0:
            return
        try:  # Perhaps it was decided only since the last look.
            self.store.head(keys.commit(self.round, self.fragment))
        except NotFoundError:
            raise MissedRoundError(f"round {self.round} was decided long ago") from None

    def _raise_if_hopeless(self, missing: set[int], watch: Watch) -> None:
        # Who has begun is waited for as in any round; who has not may be queueing somewhere.
        late = watch.waited_s >= self.timeout_s and watch.waited_s < watch.timeout_s
        if watch.expired or (late and self._have_begun(missing, watch)):
            raise self._timeout(missing, watch)

    def _have_begun(self, ranks: set[int], watch: Watch) -> bool:
        now = watch.clock.now()
        if self._asked_at is not None and now - self._asked_at < self.membership.heartbeat_s:
            return False
        self._asked_at = now
        lives = self.membership.roster()
        return bool(lives) and all(lives.get(rank) != "starting" for rank in ranks)

    def _timeout(self, absent: set[int], watch: Watch) -> RoundTimeoutError:
        ranks = ", ".join(map(str, sorted(absent)))
        return RoundTimeoutError(
            f"round {self.round}: replica {ranks} did not contribute within {watch.waited_s:.0f} s",
            fix="See why with `diloco-cloud status`; `resume` restarts what has stopped.",
        )

    # -- deciding ------------------------------------------------------------------------------

    def _create(self, seen: Attendance) -> Commit | None:
        """Make the decision; None if this replica cannot know that its key is the run's."""
        if not self.membership.is_strict:
            self._raise_if_behind()
        headers: dict[int, tuple[Header, str]] = {}
        corrupt: dict[int, tuple[int, str]] = {}
        foreign = False
        here = [seen.arrived[rank] for rank in sorted(seen.arrived)]
        with ThreadPoolExecutor(self.payloads.parallel, "diloco-headers") as pool:
            for arrival, header in zip(here, pool.map(self._header, here), strict=True):
                if isinstance(header, CorruptContributionError):
                    corrupt[arrival.rank] = (arrival.attempt, header.message)
                    foreign = foreign or isinstance(header, ForeignObjectError)
                else:
                    headers[arrival.rank] = header
        if foreign and not self.payloads.signer.confirmed:
            return None
        commit = self.decide(headers, leaving=sorted(seen.leaving), corrupt=corrupt)
        if self._verify(commit, headers, corrupt):
            commit = self.decide(headers, leaving=sorted(seen.leaving), corrupt=corrupt)
        try:
            self.store.create(keys.commit(self.round, self.fragment), commit.encode())
        except AlreadyExistsError:
            commit = self._read()
        return self._undisputed(commit)

    def _undisputed(self, commit: Commit) -> Commit:
        """``commit``, unless another may have been made and deleted before it.

        A process that stands still before its create, until the round has been decided by others
        and deleted, makes a second decision; so it, and whoever reads that, must not go by it. If
        it was no second one after all, the ledger will tell that this replica's work counted.
        """
        if not self.membership.is_strict and newer_snapshots(self.store, self.round) > 1:
            raise MissedRoundError(f"round {self.round} may have been decided before")
        return commit

    def _nobody_else(self, watch: Watch) -> ForeignObjectError:
        return ForeignObjectError(
            f"round {self.round}: within {watch.waited_s:.0f} s no other replica contributed what "
            "is signed with this replica's key",
            fix="Give every replica of the run the same key.",
        )

    def _verify(
        self,
        commit: Commit,
        headers: dict[int, tuple[Header, str]],
        corrupt: dict[int, tuple[int, str]],
    ) -> bool:
        """Read what everybody is about to read, where that is little, and sort out what is bad.

        A contribution whose bytes are damaged is then left out of the decision, instead of making
        it useless. Where a lot is moved, in shards, the shard's owner finds the damage.
        """
        peers = [one for one in commit.contributors if one.header != self.own[1]]
        known = (headers[one.rank][0] for one in peers)
        if commit.plan != "all-gather" or not self.payloads.has_room(known):
            return False

        def load(one: Contributor) -> bool | DilocoError:
            try:
                return self.payloads.load(commit, one, self.layout)
            except (CorruptContributionError, NotFoundError) as error:
                return error

        sound = True
        with ThreadPoolExecutor(self.payloads.parallel, "diloco-verify") as pool:
            for one, found in zip(peers, pool.map(load, peers), strict=True):
                if isinstance(found, DilocoError):
                    corrupt[one.rank] = (one.attempt, found.message)
                    del headers[one.rank]
                elif not found:
                    header, name = headers[one.rank]
                    headers[one.rank] = (replace(header, finite=False), name)
                sound = sound and found is True
        return not sound

    def _header(self, arrival: Arrival) -> tuple[Header, str] | CorruptContributionError:
        """An arrival's header and digest, or why it cannot be used."""
        own, life = self.own[0], (arrival.rank, arrival.attempt)
        if life == (own.rank, own.attempt) and self.is_own_there:
            return self.own
        damage = self.payloads.damaged.get(life)
        if damage is not None:
            return CorruptContributionError(damage)
        with self.payloads.reading(life):
            known = self.payloads.opened.get(life)
            if known is not None and known[0].size == arrival.info.size:
                return known  # The contribution proper is the same header once more.
            found = self._read_header(arrival)
            if not isinstance(found, CorruptContributionError) and found[0].spread:
                self.payloads.opened[life] = found
            return found

    def _read_header(self, arrival: Arrival) -> tuple[Header, str] | CorruptContributionError:
        own, key = self.own[0], arrival.info.key
        try:
            header, name = read_header(
                self.store, key, own.size, size=arrival.info.size, signer=self.payloads.signer
            )
        except CorruptContributionError as error:
            return error
        except NotFoundError:
            return CorruptContributionError(f"{key}: gone while it was read")
        here = (self.run, self.round, self.fragment, arrival.rank, arrival.attempt)
        if header.place != here:
            return CorruptContributionError(f"{key}: written for another run, round or rank")
        self.payloads.headers[name] = header
        return header, name
