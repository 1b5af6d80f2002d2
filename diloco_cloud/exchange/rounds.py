"""One replica's side of a round: contribute, agree, reduce."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from diloco_cloud.errors import (
    AlreadyExistsError,
    DriftError,
    ExchangeError,
    LayoutMismatchError,
)
from diloco_cloud.exchange import keys
from diloco_cloud.exchange.agreement import Agreement, Clock, Watch, read_header
from diloco_cloud.exchange.commit import DRIFTED, Commit
from diloco_cloud.exchange.contribution import CHUNK_BYTES, Header, checksums, digest, header_size
from diloco_cloud.exchange.layout import TensorLayout
from diloco_cloud.exchange.reduction import Reducer
from diloco_cloud.store.base import ObjectStore


@dataclass(frozen=True)
class RoundResult:
    """What a round came to.

    Attributes:
        commit: the agreed decision.
        tensors: the reduced tensors in the caller's order, on the CPU; None after a discard.
    """

    commit: Commit
    tensors: list[torch.Tensor] | None


@dataclass
class RoundExchange:
    """Runs rounds for one life of one rank. Not safe for two rounds at once.

    Attributes:
        store: the run's prefix.
        run: the run's id; objects that name another are refused.
        timeout_s: how long a round waits for peers; the first uses ``join_timeout_s``, because
            replicas start minutes apart.
        poll_interval_s: the longest pause between two looks at the store.
        chunk_bytes: the unit of checksums, reads and shards; the same on every replica.
        patience_s: how long a shard's owner is waited for before this replica does the shard.
        waiting_for: told the ranks a round still waits for.
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
    patience_s: float = 5.0
    reduction: str = "auto"
    weighting: str = "tokens"
    clock: Clock = field(default_factory=Clock)
    waiting_for: Callable[[list[int]], None] = lambda _missing: None
    #: Ranks that have left the run, as of the last commit this replica saw.
    finished: tuple[int, ...] = ()
    _met: bool = False
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def expected(self) -> list[int]:
        """Ranks whose part the next round waits for."""
        return [rank for rank in range(self.world_size) if rank not in self.finished]

    def watch(self) -> Watch:
        """A watch for the next wait on peers."""
        timeout = self.timeout_s if self._met else max(self.timeout_s, self.join_timeout_s)
        return Watch(self.clock, timeout, self.poll_interval_s, stopped=self._stop.is_set)

    def stop(self) -> None:
        """End a wait that is under way in another thread, with ``ExchangeError`` there."""
        self._stop.set()

    def exchange(
        self,
        round_: int,
        fragment: int,
        tensors: Sequence[torch.Tensor],
        *,
        names: Sequence[str] | None = None,
        base: str = "",
        tokens: int = 0,
        inner_steps: int = 0,
    ) -> RoundResult:
        """Contribute ``tensors`` to a round and return what was agreed.

        ``tensors`` are read, not written, and must not change until this returns.

        Args:
            round_: counts decisions, from 0; the same on every replica.
            fragment: index of the model fragment the tensors belong to.
            tensors: any mixture of fp32, bf16, fp16 and fp64.
            names: of the tensors; part of what replicas must agree on.
            base: digest of the global parameters the tensors were taken against.
            tokens: processed since the last round; the weight in the mean.
            inner_steps: optimizer steps since the last round.

        Raises:
            RoundTimeoutError: peers did not come in time.
            LayoutMismatchError: replicas contributed other tensors.
            DriftError: this replica's ``base`` is not the others'.
            CorruptContributionError: a committed object is damaged.
            StoreError: the store failed beyond retrying.
        """
        layout = TensorLayout.of(tensors, names)
        views = layout.views(tensors)
        header = Header(
            kind="contribution",
            run=self.run,
            round=round_,
            fragment=fragment,
            rank=self.rank,
            attempt=self.attempt,
            layout=layout.digest,
            nbytes=layout.nbytes,
            base=base,
            tokens=tokens,
            inner_steps=inner_steps,
            finite=all(bool(torch.isfinite(t).all()) for t in tensors),
            chunk_bytes=self.chunk_bytes,
            checksums=checksums(views, self.chunk_bytes),
        )
        own, created = self._put(header, views)
        agreement = Agreement(
            store=self.store,
            run=self.run,
            round=round_,
            fragment=fragment,
            expected=self.expected,
            finished=self.finished,
            own=own,
            reduction=self.reduction,
            weighting=self.weighting,
            waiting_for=self.waiting_for,
        )
        commit = agreement.reach(self.watch())
        self._met, self.finished = True, commit.finished
        self._raise_if_out(commit)
        if commit.decision == "discard":
            return RoundResult(commit, None)
        reducer = Reducer(
            self.store,
            commit,
            layout,
            self.watch,
            patience_s=self.patience_s,
            own=(header, views) if created else None,
            headers=agreement.headers,
        )
        return RoundResult(commit, layout.unpack(reducer.reduce()))

    def replay(self, commit: Commit, layout: TensorLayout) -> list[torch.Tensor]:
        """The reduced tensors of an earlier round, from what the store kept of it."""
        return layout.unpack(
            Reducer(self.store, commit, layout, self.watch, patience_s=0.0).reduce()
        )

    def leave(self, round_: int, fragment: int) -> bool:
        """Say that this replica contributes no more, from ``round_`` on.

        Returns:
            Whether everybody has left, which makes the caller one of the last (several may be).
        """
        header = Header(
            kind="leave",
            run=self.run,
            round=round_,
            fragment=fragment,
            rank=self.rank,
            attempt=self.attempt,
        )
        self._put(header, [])
        left: set[int] = set()
        for info in self.store.list(keys.directory(round_, fragment)):
            place = keys.parse_put(info.key)
            # A leave has no payload, so its size tells it from a contribution.
            if place is not None and info.size == header_size(0):
                left.add(place[0])
        return left.issuperset(self.expected)

    def _put(self, header: Header, views: list[memoryview]) -> tuple[tuple[Header, str], bool]:
        """Create this replica's object, or read back the one that is there.

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
            stored, name = read_header(
                self.store, self.store.head(key), header.nbytes, header.chunk_bytes
            )
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
        if commit.decision == "abort":
            raise LayoutMismatchError(
                f"round {commit.round}: {commit.reason}",
                fix="Every replica must build the same model, in the same precision.",
            )
        for excluded in commit.excluded:
            if (excluded.rank, excluded.reason) == (self.rank, DRIFTED):
                raise DriftError(
                    f"round {commit.round}: replica {self.rank} was {excluded.reason}",
                    fix="Restart it (`resume`): it will fetch the agreed state from the store.",
                )
