"""One replica's side of a round: contribute, agree, reduce."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from diloco_cloud.errors import MissedRoundError, NotFoundError
from diloco_cloud.exchange import verdicts
from diloco_cloud.exchange.agreement import Agreement, raise_if_superseded
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.contributing import Contributing, Packed
from diloco_cloud.exchange.contribution import RAW
from diloco_cloud.exchange.deciding import decide
from diloco_cloud.exchange.gathering import Gathering
from diloco_cloud.exchange.history import History
from diloco_cloud.exchange.layout import TensorLayout
from diloco_cloud.exchange.links import LinkMeter
from diloco_cloud.exchange.membership import Membership
from diloco_cloud.exchange.payloads import PARALLEL_READS, Payloads, read_header
from diloco_cloud.exchange.reduction import Destination, Reducer, memory_for, reduced
from diloco_cloud.exchange.residuals import Owed
from diloco_cloud.exchange.signing import UNSIGNED, Signer
from diloco_cloud.exchange.speculation import Headers, Speculation
from diloco_cloud.exchange.upload import PARALLEL_WRITES
from diloco_cloud.exchange.watch import Clock, Watch
from diloco_cloud.exchange.words import Words
from diloco_cloud.exchange.work import Contributed, RoundResult, Work
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)


@dataclass
class RoundExchange(Words):
    """Runs rounds for one life of one rank. Not safe for two rounds at once.

    Attributes:
        store: the run's prefix.
        run: the run's id; objects that name another are refused.
        membership: who a round waits for; by default all of ``world_size``.
        timeout_s: how long a round waits for peers that nothing is known of.
        join_timeout_s: how long the first round waits for peers that have not begun: replicas
            start minutes apart.
        poll_interval_s: the longest pause between two looks at the store.
        chunk_bytes: what is read, averaged and checked at a time; None: as planned, or by size.
        patience_s: how long a chunk's owner is waited for at least before this replica does it.
        codec: how contributions are encoded; the same on every replica. See :mod:`.codecs`.
        reduction: "all-gather", "sharded", or "auto": as planned by what the links have carried.
        weighting: how much a contribution counts. See :mod:`.weighting`.
        merge: "mean", or "rda": directions and lengths are averaged on their own (:mod:`.merging`).
        meter: measures this replica's link, which the planning goes by.
        outlier_norm: contributions longer than so many times the median are left out.
        signer: makes and checks the macs of a signed run.
        waiting_for: told the ranks a round still waits for.
        reducers: how many volunteers there are (:mod:`.volunteer`).
        gives_up: whether waiting for others is to end, for a reason outside the exchange.
        history: the decisions that this replica has seen, or read from a snapshot.
        contributed: the newest round that this life has contributed to.
        contributing: packs and sends.
    """

    store: ObjectStore
    run: str
    rank: int
    world_size: int
    attempt: int = 0
    timeout_s: float = 1800.0
    join_timeout_s: float = 1800.0
    poll_interval_s: float = 1.0
    chunk_bytes: int | None = None
    patience_s: float = 1.0
    codec: str = RAW
    reduction: str = "auto"
    weighting: str = "tokens"
    merge: str = "mean"
    outlier_norm: float | None = None
    signer: Signer = UNSIGNED
    clock: Clock = field(default_factory=Clock)
    waiting_for: Callable[[list[int]], None] = lambda _missing: None
    gives_up: Callable[[], bool] = lambda: False
    reducers: Callable[[], int] = lambda: 0
    meter: LinkMeter | None = None
    membership: Membership = field(init=False)
    history: History = field(default_factory=History, init=False)
    contributed: int = field(default=-1, init=False)
    contributing: Contributing = field(init=False)
    #: How long the last decisions were waited for. The next is to be looked for from the shortest
    #: on: an event that comes before it is expected is noticed late.
    _waits: deque[float] = field(default_factory=lambda: deque(maxlen=3), init=False)
    _met: bool = field(default=False, init=False)
    _opened_at: float = field(init=False)
    _stop: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        self.membership = Membership(self.world_size)
        self.contributing = Contributing(self.store, self.run, self.rank, self.attempt, self.signer)
        self._opened_at = self.clock.now()

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
        averaged_plainly: Sequence[bool] | None = None,
        in_place: bool = False,
        before_sending: Callable[[Owed], None] | None = None,
    ) -> RoundResult:
        """Contribute ``tensors`` to a round and return what was agreed.

        ``tensors`` must not change until this returns.

        Args:
            round_: counts decisions, from 0; the same on every replica.
            fragment: index of the model fragment the tensors belong to.
            tensors: any mixture of fp32, bf16, fp16 and fp64.
            work: what they stand for.
            names: of the tensors; part of what replicas must agree on.
            averaged_plainly: for each tensor, whether :attr:`merge` makes no difference to it.
            in_place: large ``tensors`` may make way for what is encoded of them, and for the means,
                which saves that memory; where there are no means, they are then lost.
            before_sending: told what is unsent meanwhile, for whoever has to store that first.

        Raises:
            MissedRoundError: the round was decided without them.
            RoundTimeoutError: peers did not come in time.
            LayoutMismatchError: replicas contributed other tensors.
            DriftError: this replica's parameters are not the others'.
            CorruptContributionError: a committed object is damaged.
            ExchangeError: this rank has left the run, or the wait was interrupted.
            StoreError: the store failed beyond retrying.
        """
        stop, work = self._stop, Work() if work is None else work
        began = self.clock.now()
        packed = self._pack(round_, fragment, tensors, work, names, averaged_plainly, in_place)
        if before_sending is not None:
            before_sending(self.contributing.owed(packed))
        into = packed.destination()
        parallel = self.planned_parallel(fragment, PARALLEL_READS)
        processor = self.contributing.processor
        payloads = Payloads(self.store, packed.own, self.signer, parallel, processor)
        ahead = self._speculate(packed, payloads, into, stop)
        try:
            mine = self._send(packed, payloads)
            self.contributed = round_
            agreement = self._agreement(round_, fragment, mine)
            agreement.pace_s = began - self._opened_at
            watch = self.watch(stop)
            watch.expected_s = min(self._waits, default=None)
            commit = agreement.reach(watch)
            decided = self.clock.now()
            self._waits.append(watch.waited_s)
            verdicts.raise_if_given_up(stop)
            verdicts.raise_if_out(self.rank, work.base, commit)
            if not self.membership.is_strict:
                verdicts.raise_if_missed(commit, mine.own[0])
            result = self._result(commit, packed, mine.payloads, into, stop, ahead)
        finally:
            if ahead is not None:
                ahead.stop()
        verdicts.raise_if_given_up(stop)
        grace_s = 0.0 if agreement.quorum_at is None else decided - agreement.quorum_at
        exchange_s = self.clock.now() - began - grace_s
        has_mean = result.tensors is not None  # Or else nothing was read.
        self.contributing.end_round(packed.own.header, exchange_s if has_mean else 0.0)
        self._note(agreement, result, exchange_s)
        return result

    def contribute(
        self,
        round_: int,
        fragment: int,
        tensors: Sequence[torch.Tensor],
        work: Work,
        *,
        names: Sequence[str] | None = None,
        averaged_plainly: Sequence[bool] | None = None,
        after_sending: Callable[[Owed], None] | None = None,
    ) -> None:
        """Contribute as :meth:`exchange` does, and leave the decision to the others."""
        packed = self._pack(round_, fragment, tensors, work, names, averaged_plainly)
        self._send(packed, Payloads(self.store))
        if after_sending is not None:
            after_sending(self.contributing.owed(packed))

    def await_decision(self, round_: int, fragment: int, key: str) -> Commit:
        """Wait for the decision of a round that an earlier life of this rank contributed to.

        Args:
            round_: the open round.
            fragment: whose turn it is.
            key: of that life's contribution.

        Raises:
            RoundTimeoutError: peers did not come in time.
        """
        size = self.store.head(key).size
        own = read_header(self.store, key, size, size=size, signer=self.signer, own=True)
        payloads = Payloads(self.store, signer=self.signer)
        mine = Contributed(payloads, None, own, is_there=True)
        return self._agreement(round_, fragment, mine).reach(self.watch())

    def replay(self, commit: Commit, layout: TensorLayout) -> RoundResult:
        """The result of an earlier round, from what the store kept of it."""
        payloads = Payloads(self.store, signer=self.signer)
        payload, into = memory_for(layout, commit.chunk_bytes)
        reducer = Reducer(self.store, commit, layout, payloads, into, self.watch, patience_s=0.0)
        return reduced(commit, reducer.reduce, layout.unpack(payload))

    # -- inside --------------------------------------------------------------------------------

    def _pack(
        self,
        round_: int,
        fragment: int,
        tensors: Sequence[torch.Tensor],
        work: Work,
        names: Sequence[str] | None,
        averaged_plainly: Sequence[bool] | None,
        in_place: bool = False,
    ) -> Packed:
        verdicts.raise_if_finished(self.rank, round_, self.history)
        contributing = self.contributing
        contributing.codec, contributing.reduction = self.codec, self.reduction
        contributing.merge = self.merge
        contributing.chunk_bytes, contributing.meter = self.chunk_bytes, self.meter
        if self.meter is not None:
            contributing.processor.overlap = self.meter.overlap
        return contributing.pack(
            round_,
            fragment,
            tensors,
            work,
            names=names,
            contributors=len(self.expected),
            reducers=self.reducers(),
            plan=self.history.plans.get(fragment),
            averaged_plainly=averaged_plainly,
            in_place=in_place,
        )

    def _send(self, packed: Packed, payloads: Payloads) -> Contributed:
        expected = self.expected
        place = expected.index(self.rank) if self.rank in expected else 0
        parallel = self.planned_parallel(packed.own.header.fragment, PARALLEL_WRITES)
        own, same = self.contributing.send(packed, place, parallel)
        if not same:
            payloads.own = None
        return Contributed(payloads, packed.layout, own, is_there=same is not None)

    def _speculate(
        self, packed: Packed, payloads: Payloads, into: Destination, stop: threading.Event
    ) -> Speculation | None:
        """Begin to average ahead of the decision, where everybody sends chunk by chunk."""
        header = packed.own.header
        if not header.spread:
            return None

        def expect(headers: Headers) -> Commit:
            return self._decide(headers, header.round, header.fragment)

        def gather(commit: Commit, given_up: Callable[[], bool]) -> Gathering:
            reducer = self._reducer(commit, packed.layout, payloads, into, stop)
            return reducer.gathering(ahead=True, given_up=given_up)

        new_watch: Any = partial(self.watch, stop)
        expected = frozenset(self.expected)
        ahead = Speculation(payloads, packed.layout, expected, expect, gather, new_watch)
        ahead.start()
        return ahead

    def _decide(self, headers: Headers, round_: int, fragment: int, **seen: Any) -> Commit:
        return decide(
            headers,
            run=self.run,
            round_=round_,
            fragment=fragment,
            before=self.history,
            weighting=self.weighting,
            reduction=self.reduction,
            outlier_norm=self.outlier_norm,
            **seen,
        ).sign(self.signer)

    def _agreement(self, round_: int, fragment: int, mine: Contributed) -> Agreement:
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
            decide=partial(self._decide, round_=round_, fragment=fragment),
            waiting_for=self.waiting_for,
        )

    def _reducer(
        self,
        commit: Commit,
        layout: TensorLayout,
        payloads: Payloads,
        into: Destination,
        stop: threading.Event,
    ) -> Reducer:
        new_watch: Any = partial(self.watch, stop)
        rest = self.patience_s, stop.is_set
        return Reducer(self.store, commit, layout, payloads, into[1], new_watch, *rest)

    def _result(
        self,
        commit: Commit,
        packed: Packed,
        payloads: Payloads,
        into: Destination,
        stop: threading.Event,
        ahead: Speculation | None,
    ) -> RoundResult:
        """What the decision comes to; what was averaged in expectation of it is taken over."""
        if commit.decision == "commit" and commit.chunk_bytes != packed.own.header.chunk_bytes:
            into = packed.destination(commit.chunk_bytes)
        settlement, result = None, None
        # What an earlier process of this life sent is nothing that this one left unsent.
        if payloads.own is not None and commit.averages(self.rank, self.attempt):
            settlement = self.contributing.settlement(packed)
        into = packed.settling(into, settlement)
        reducer = self._reducer(commit, packed.layout, payloads, into, stop)

        def reduce() -> None:
            if ahead is None or not ahead.comes_true(commit):
                reducer.reduce()

        try:
            return (result := reduced(commit, reduce, into[0]))
        except NotFoundError as error:
            if self.membership.is_strict:
                raise
            raise MissedRoundError(f"round {commit.round} is over: {error.message}") from error
        finally:
            # Whatever goes wrong here, the round has it, unless nobody can apply its mean.
            if settlement is not None and (result is None or result.tensors is not None):
                settlement.settle_all()

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
