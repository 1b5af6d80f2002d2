"""One replica's side of a round: contribute, agree, reduce."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from diloco_cloud import keys
from diloco_cloud.errors import (
    AlreadyExistsError,
    CorruptContributionError,
    DriftError,
    ExchangeError,
    LayoutMismatchError,
    LeftRunError,
    MissedRoundError,
    NotFoundError,
)
from diloco_cloud.exchange.agreement import Agreement, Clock, Watch, raise_if_superseded
from diloco_cloud.exchange.commit import DRIFTED, Commit
from diloco_cloud.exchange.contribution import CHUNK_BYTES, Header, checksums, digest
from diloco_cloud.exchange.history import History
from diloco_cloud.exchange.layout import TensorLayout, all_finite, l2_norm
from diloco_cloud.exchange.membership import Attendance, Membership
from diloco_cloud.exchange.payloads import Payloads, read_header
from diloco_cloud.exchange.reduction import NoMeanError, Reducer
from diloco_cloud.exchange.signing import UNSIGNED, Signer
from diloco_cloud.exchange.work import Contributed, RoundResult, Work
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)


@dataclass
class RoundExchange:
    """Runs rounds for one life of one rank. Not safe for two rounds at once.

    Attributes:
        store: the run's prefix.
        run: the run's id; objects that name another are refused.
        membership: who a round waits for; by default all of ``world_size``.
        timeout_s: how long a round waits for peers that nothing is known of.
        join_timeout_s: how long the first round waits for peers that have not begun: replicas
            start minutes apart.
        poll_interval_s: the longest pause between two looks at the store.
        chunk_bytes: the unit of checksums, reads and shards; the same on every replica.
        patience_s: how long a shard's owner is waited for at least before this replica does it.
        outlier_norm: contributions longer than so many times the median are left out.
        signer: makes and checks the macs of a signed run.
        waiting_for: told the ranks a round still waits for.
        gives_up: whether waiting for others is to end, for a reason outside the exchange.
        history: the decisions that this replica has seen, or read from a snapshot.
        contributed: the newest round that this life has contributed to.
    """

    store: ObjectStore
    run: str
    rank: int
    world_size: int
    attempt: int = 0
    timeout_s: float = 1800.0
    join_timeout_s: float = 1800.0
    poll_interval_s: float = 1.0
    chunk_bytes: int = CHUNK_BYTES
    patience_s: float = 1.0
    reduction: str = "auto"
    weighting: str = "tokens"
    outlier_norm: float | None = None
    signer: Signer = UNSIGNED
    clock: Clock = field(default_factory=Clock)
    waiting_for: Callable[[list[int]], None] = lambda _missing: None
    gives_up: Callable[[], bool] = lambda: False
    membership: Membership = field(init=False)
    history: History = field(default_factory=History, init=False)
    contributed: int = field(default=-1, init=False)
    _met: bool = field(default=False, init=False)
    _opened_at: float = field(init=False)
    _stop: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        self.membership = Membership(self.world_size)
        self._opened_at = self.clock.now()

    @property
    def expected(self) -> list[int]:
        """Ranks whose part the next round waits for, as far as is known before it."""
        nobody = Attendance.of([], self.history.round, 0)
        return sorted(self.membership.expected(nobody, self.history, {}, cold=False))

    def watch(self, stop: threading.Event | None = None) -> Watch:
        """A watch for a wait on peers, which :meth:`interrupt` ends."""
        cold = not self._met
        timeout = max(self.timeout_s, self.join_timeout_s) if cold else self.timeout_s
        stop = self._stop if stop is None else stop
        return Watch(
            self.clock,
            timeout,
            self.poll_interval_s,
            stopped=lambda: stop.is_set() or self.gives_up(),
        )

    def interrupt(self) -> None:
        """End the waits under way in other threads, with ``ExchangeError`` there."""
        stop, self._stop = self._stop, threading.Event()
        stop.set()

    def begin(self, history: History) -> None:
        """Go on after these decisions; the time until the next one starts now.

        Raises:
            ExchangeError: a newer life of this rank was in one of them.
        """
        raise_if_superseded(self.rank, self.attempt, history.attempt_of(self.rank))
        self.history = history
        self._opened_at = self.clock.now()

    # -- a round -------------------------------------------------------------------------------

    def exchange(
        self,
        round_: int,
        fragment: int,
        tensors: Sequence[torch.Tensor],
        work: Work | None = None,
        *,
        names: Sequence[str] | None = None,
    ) -> RoundResult:
        """Contribute ``tensors`` to a round and return what was agreed.

        ``tensors`` are read, not written, and must not change until this returns.

        Args:
            round_: counts decisions, from 0; the same on every replica.
            fragment: index of the model fragment the tensors belong to.
            tensors: any mixture of fp32, bf16, fp16 and fp64.
            work: what they stand for.
            names: of the tensors; part of what replicas must agree on.

        Raises:
            MissedRoundError: the round was decided without them.
            RoundTimeoutError: peers did not come in time.
            LayoutMismatchError: replicas contributed other tensors.
            DriftError: this replica's parameters are not the others'.
            CorruptContributionError: a committed object is damaged.
            ExchangeError: this rank has left the run, or the wait was interrupted.
            StoreError: the store failed beyond retrying.
        """
        stop = self._stop
        work = Work() if work is None else work
        began = self.clock.now()
        mine = self._contribute(round_, fragment, tensors, work, names)
        self.contributed = round_
        agreement = self._agreement(round_, fragment, mine)
        agreement.pace_s = began - self._opened_at
        commit = agreement.reach(self.watch(stop))
        decided = self.clock.now()
        if stop.is_set():  # Whoever asked has given up, and may have begun anew meanwhile.
            raise ExchangeError("the wait for other replicas was given up")
        self._raise_if_out(commit)
        if commit.decision == "commit" and commit.base != work.base:
            # A life that slept through rounds that have been deleted since: it was alone in this
            # one, or found a decision that it has no part in.
            raise DriftError(
                f"round {round_} was decided on other global parameters than replica {self.rank}'s"
            )
        self._raise_if_missed(commit, mine.own[0])
        assert mine.layout is not None
        try:
            result = self._reduce(commit, mine.layout, mine.payloads, stop)
        except NotFoundError as error:
            if self.membership.is_strict:
                raise
            raise MissedRoundError(f"round {round_} is over: {error.message}") from error
        grace_s = 0.0 if agreement.quorum_at is None else decided - agreement.quorum_at
        self._note(agreement, result, self.clock.now() - began - grace_s)
        return result

    def contribute(
        self,
        round_: int,
        fragment: int,
        tensors: Sequence[torch.Tensor],
        work: Work,
        *,
        names: Sequence[str] | None = None,
    ) -> None:
        """Contribute as :meth:`exchange` does, and leave the decision to the others."""
        self._contribute(round_, fragment, tensors, work, names)

    def await_decision(self, round_: int, fragment: int, key: str) -> Commit:
        """Wait for the decision of a round that an earlier life of this rank contributed to.

        Args:
            round_: the open round.
            fragment: whose turn it is.
            key: of that life's contribution.

        Raises:
            RoundTimeoutError: peers did not come in time.
        """
        info = self.store.head(key)
        own = read_header(self.store, info, 0, self.chunk_bytes, self.signer, own=True)
        payloads = Payloads(self.store, signer=self.signer)
        mine = Contributed(payloads, None, own, is_there=True)
        agreement = self._agreement(round_, fragment, mine)
        return agreement.reach(self.watch())

    def replay(self, commit: Commit, layout: TensorLayout) -> RoundResult:
        """The result of an earlier round, from what the store kept of it."""
        payloads = Payloads(self.store, signer=self.signer)
        reducer = Reducer(self.store, commit, layout, payloads, self.watch, patience_s=0.0)
        return _result(reducer)

    # -- words to the others -------------------------------------------------------------------

    def announce(self, round_: int, fragment: int) -> None:
        """Say that this life has come up to the open round, and will be in it."""
        if not self.membership.is_strict:
            self.store.put(keys.join(round_, fragment, self.rank, self.attempt), b"")

    def depart(self, round_: int, fragment: int) -> None:
        """Say that this life ends, so that nobody waits for it."""
        if not self.membership.is_strict:
            self.store.put(keys.away(round_, fragment, self.rank, self.attempt), b"")

    def leave(self, round_: int, fragment: int) -> None:
        """Say that this replica contributes no more, from ``round_`` on."""
        self.store.put(keys.leave(round_, fragment, self.rank, self.attempt), b"")

    def look(self, round_: int, fragment: int) -> Attendance:
        """Who is in an open round."""
        listed = self.store.list(keys.directory(round_, fragment))
        return Attendance.of(listed, round_, fragment, self.history)

    def still_going(self, round_: int, fragment: int) -> set[int]:
        """Ranks that this round waits for and that have not left."""
        seen, rules = self.look(round_, fragment), self.membership
        lives = {} if rules.is_strict else rules.roster()
        return rules.expected(seen, self.history, lives, cold=False)

    # -- inside --------------------------------------------------------------------------------

    def _contribute(
        self,
        round_: int,
        fragment: int,
        tensors: Sequence[torch.Tensor],
        work: Work,
        names: Sequence[str] | None,
    ) -> Contributed:
        self._raise_if_finished(round_)
        layout = TensorLayout.of(tensors, names)
        views = layout.views(tensors)
        norm = l2_norm(tensors)
        header = Header(
            kind="contribution",
            run=self.run,
            round=round_,
            fragment=fragment,
            rank=self.rank,
            attempt=self.attempt,
            layout=layout.digest,
            nbytes=layout.nbytes,
            # A norm can overflow where all elements are finite.
            finite=math.isfinite(norm) or all(map(all_finite, tensors)),
            norm=norm if math.isfinite(norm) else 0.0,
            chunk_bytes=self.chunk_bytes,
            checksums=checksums(views, self.chunk_bytes, self.signer),
            **vars(work),
        ).sign(self.signer)
        own, same = self._put(header, views)
        payloads = Payloads(self.store, (header, views) if same else None, self.signer)
        return Contributed(payloads, layout, own, is_there=same is not None)

    def _agreement(
        self,
        round_: int,
        fragment: int,
        mine: Contributed,
    ) -> Agreement:
        return Agreement(
            store=self.store,
            run=self.run,
            round=round_,
            fragment=fragment,
            history=self.history,
            membership=self.membership,
            own=mine.own,
            is_own_there=mine.is_there,
            attempt=self.attempt,
            payloads=mine.payloads,
            layout=mine.layout,
            timeout_s=self.timeout_s,
            join_timeout_s=self.join_timeout_s,
            reduction=self.reduction,
            weighting=self.weighting,
            outlier_norm=self.outlier_norm,
            waiting_for=self.waiting_for,
        )

    def _reduce(
        self, commit: Commit, layout: TensorLayout, payloads: Payloads, stop: threading.Event
    ) -> RoundResult:
        new_watch: Any = partial(self.watch, stop)
        reducer = Reducer(
            self.store, commit, layout, payloads, new_watch, patience_s=self.patience_s
        )
        return _result(reducer)

    def _note(self, agreement: Agreement, result: RoundResult, exchange_s: float) -> None:
        """Take in a decision that this replica has a part in."""
        now = self.clock.now()
        commit = result.commit
        self._met = True
        if agreement.seen is not None:
            round_s = now - self._opened_at
            self.membership.learn(
                agreement.seen, self.history, agreement.needed, round_s, exchange_s
            )
        self.history.note(commit, applied=result.tensors is not None)
        self._opened_at = now

    def _put(
        self, header: Header, views: list[memoryview]
    ) -> tuple[tuple[Header, str], bool | None]:
        """Create this replica's object, or read back the one that is there.

        Returns:
            The header that the object has, its digest, and whether its bytes are those in memory;
            None if it is no contribution of this replica's.

        A life that was killed after its PUT and restarted without a new attempt must use what it
        wrote then, since peers may have read it. In a round that was decided already, though, the
        object belongs to somebody else's past, and using it would be silent corruption.
        """
        encoded = header.encode()
        key = keys.put(header.round, header.fragment, self.rank, self.attempt)
        try:
            self.store.create(key, [encoded, *views])
            return (header, digest(encoded)), True
        except AlreadyExistsError:
            pass
        try:
            info = self.store.head(key)
            stored, name = read_header(
                self.store, info, header.nbytes, header.chunk_bytes, self.signer, own=True
            )
            if stored.place != header.place:
                raise CorruptContributionError(f"{key}: written for another run, round or rank")
        except CorruptContributionError as error:
            # A torn write of ours, or somebody else's: either way the round goes without this
            # work, which is kept for the next.
            logger.warning("%s", error.message)
            return (header, digest(encoded)), None
        if name == digest(encoded):
            return (stored, name), True
        decided = keys.commit(header.round, header.fragment)
        if any(i.key == decided for i in self.store.list(decided)):
            raise ExchangeError(
                f"round {header.round} is already decided in {self.store.uri}, with another "
                f"contribution of replica {self.rank}",
                fix="Use a fresh prefix, or give a restarted replica the next DILOCO_ATTEMPT.",
            )
        return (stored, name), False

    def _raise_if_out(self, commit: Commit) -> None:
        """Raise if this replica cannot take part in what was decided."""
        if commit.decision == "abort":
            raise LayoutMismatchError(
                f"round {commit.round}: {commit.reason}",
                fix="Every replica must build the same model, in the same precision.",
            )
        if self.rank in commit.finished:
            raise _finished(self.rank, commit.round)
        exclusion = commit.exclusion_of(self.rank)
        if exclusion is not None and exclusion.reason == DRIFTED:
            raise DriftError(f"round {commit.round}: replica {self.rank}'s work was {DRIFTED}")

    def _raise_if_missed(self, commit: Commit, own: Header) -> None:
        if commit.includes(own.rank, own.attempt) or self.membership.is_strict:
            return
        exclusion = commit.exclusion_of(own.rank)
        reason = f": {exclusion.reason}" if exclusion is not None else ""
        raise MissedRoundError(f"round {commit.round} was decided without this replica{reason}")

    def _raise_if_finished(self, round_: int) -> None:
        if self.rank in self.history.finished:
            raise _finished(self.rank, round_)


def _finished(rank: int, round_: int) -> LeftRunError:
    return LeftRunError(
        f"replica {rank} had left the run before round {round_}",
        fix="Launch a new run to train further.",
    )


def _result(reducer: Reducer) -> RoundResult:
    """Reduce a commit. Everybody gets the same bytes, so everybody finds the same ones unusable."""
    commit = reducer.commit
    if commit.decision != "commit":
        return RoundResult(commit, None, commit.reason)
    try:
        payload = reducer.reduce()
    except NoMeanError as error:
        return RoundResult(commit, None, str(error))
    segments = (payload[s.start : s.stop].view(s.dtype) for s in reducer.layout.segments)
    if not all(map(all_finite, segments)):
        return RoundResult(commit, None, "the mean has NaN or infinite values")
    return RoundResult(commit, reducer.layout.unpack(payload))
