"""One replica's side of a round: contribute, agree, reduce."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from diloco_cloud import keys
from diloco_cloud.errors import (
    AlreadyExistsError,
    DriftError,
    ExchangeError,
    LayoutMismatchError,
)
from diloco_cloud.exchange.agreement import Agreement, Clock, Watch, read_header
from diloco_cloud.exchange.commit import DRIFTED, Commit
from diloco_cloud.exchange.contribution import CHUNK_BYTES, Header, checksums, digest
from diloco_cloud.exchange.layout import TensorLayout, all_finite
from diloco_cloud.exchange.reduction import Reducer
from diloco_cloud.store.base import ObjectStore


@dataclass(frozen=True)
class RoundResult:
    """What a round came to.

    Attributes:
        commit: the agreed decision.
        tensors: the reduced tensors in the caller's order, on the CPU; None where there is nothing
            to apply: the decision was to discard, or the mean is not finite.
    """

    commit: Commit
    tensors: list[torch.Tensor] | None

    @property
    def reason(self) -> str:
        """Why there is nothing to apply, or ""."""
        if self.tensors is not None:
            return ""
        return self.commit.reason or "the mean has NaN or infinite values"


@dataclass
class RoundExchange:
    """Runs rounds for one life of one rank. Not safe for two rounds at once.

    Attributes:
        store: the run's prefix.
        run: the run's id; objects that name another are refused.
        timeout_s: how long a round waits for peers.
        join_timeout_s: how long the first round waits for peers that have not begun: replicas
            start minutes apart.
        begun: whether all of these ranks are known to have begun; by default nothing is known.
        poll_interval_s: the longest pause between two looks at the store.
        chunk_bytes: the unit of checksums, reads and shards; the same on every replica.
        patience_s: how long a shard's owner is waited for before this replica does the shard.
        waiting_for: told the ranks a round still waits for.
        finished: ranks that have left the run, as of the last commit this replica saw.
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
    begun: Callable[[list[int]], bool] = lambda _ranks: False
    waiting_for: Callable[[list[int]], None] = lambda _missing: None
    finished: tuple[int, ...] = field(default=(), init=False)
    _met: bool = field(default=False, init=False)
    _stop: threading.Event = field(default_factory=threading.Event, init=False)

    @property
    def expected(self) -> list[int]:
        """Ranks whose part the next round waits for."""
        return [rank for rank in range(self.world_size) if rank not in self.finished]

    def watch(self, stop: threading.Event | None = None) -> Watch:
        """A watch for a wait on peers, which :meth:`interrupt` ends."""
        timeout = self.timeout_s if self._met else max(self.timeout_s, self.join_timeout_s)
        stop = self._stop if stop is None else stop
        return Watch(self.clock, timeout, self.poll_interval_s, stopped=stop.is_set)

    def interrupt(self) -> None:
        """End the waits under way in other threads, with ``ExchangeError`` there."""
        stop, self._stop = self._stop, threading.Event()
        stop.set()

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
        position: int = 0,
    ) -> RoundResult:
        """Contribute ``tensors`` to a round and return what was agreed.

        ``tensors`` are read, not written, and must not change until this returns.

        Args:
            round_: counts decisions, from 0; the same on every replica.
            fragment: index of the model fragment the tensors belong to.
            tensors: any mixture of fp32, bf16, fp16 and fp64.
            names: of the tensors; part of what replicas must agree on.
            base: digest of the global parameters the tensors were taken against.
            tokens: processed since the fragment's last sync; the weight in the mean.
            inner_steps: optimizer steps since then.
            position: inner steps of this rank's data behind it once the round is merged.

        Raises:
            RoundTimeoutError: peers did not come in time.
            LayoutMismatchError: replicas contributed other tensors.
            DriftError: this replica's ``base`` is not the others'.
            CorruptContributionError: a committed object is damaged.
            ExchangeError: this rank has left the run, or the wait was interrupted.
            StoreError: the store failed beyond retrying.
        """
        stop = self._stop
        self._raise_if_finished(round_)
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
            position=position,
            finite=all(map(all_finite, tensors)),
            chunk_bytes=self.chunk_bytes,
            checksums=checksums(views, self.chunk_bytes),
        )
        own, created = self._put(header, views)
        agreement = self._agreement(round_, fragment, own)
        commit = agreement.reach(self.watch(stop))
        if stop.is_set():  # Whoever asked has given up, and may have begun anew meanwhile.
            raise ExchangeError("the wait for other replicas was given up")
        self._met, self.finished = True, commit.finished
        self._raise_if_out(commit)
        if commit.decision == "commit" and commit.base != base:
            # A life that slept through rounds that have been deleted since: it was alone in this
            # one, or found a decision that it has no part in.
            raise DriftError(
                f"round {round_} was decided on other global parameters than replica {self.rank}'s",
                fix="Another attempt of this replica has taken over, or it must be resumed.",
            )
        reducer = Reducer(
            self.store,
            commit,
            layout,
            partial(self.watch, stop),
            patience_s=self.patience_s,
            own=(header, views) if created else None,
            headers=agreement.headers,
        )
        return _result(reducer)

    def await_decision(self, round_: int, fragment: int, key: str) -> Commit:
        """Wait for the decision of a round that an earlier life of this rank contributed to.

        Args:
            round_: the open round.
            fragment: whose turn it is.
            key: of that life's contribution.

        Raises:
            RoundTimeoutError: peers did not come in time.
        """
        own = read_header(self.store, self.store.head(key), 0, self.chunk_bytes)
        return self._agreement(round_, fragment, own).reach(self.watch())

    def replay(self, commit: Commit, layout: TensorLayout) -> RoundResult:
        """The result of an earlier round, from what the store kept of it."""
        return _result(Reducer(self.store, commit, layout, self.watch, patience_s=0.0))

    def leave(self, round_: int, fragment: int) -> bool:
        """Say that this replica contributes no more, from ``round_`` on.

        Returns:
            Whether everybody has left, which makes the caller one of the last (several may be).
        """
        directory = keys.directory(round_, fragment)
        self.store.put(keys.leave(round_, fragment, self.rank, self.attempt), b"")
        newest: dict[int, tuple[int, bool]] = {}
        for info in self.store.list(directory):
            part = keys.parse_part(info.key, directory)
            if part is not None:
                kind, rank, attempt = part
                newest[rank] = max(newest.get(rank, (-1, False)), (attempt, kind == "leave"))
        return all(newest.get(rank, (0, False))[1] for rank in self.expected)

    def _agreement(self, round_: int, fragment: int, own: tuple[Header, str]) -> Agreement:
        return Agreement(
            store=self.store,
            run=self.run,
            round=round_,
            fragment=fragment,
            expected=self.expected,
            finished=self.finished,
            own=own,
            timeout_s=self.timeout_s,
            begun=self.begun,
            reduction=self.reduction,
            weighting=self.weighting,
            waiting_for=self.waiting_for,
        )

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
        """Raise if this replica cannot take part in what was decided."""
        if commit.decision == "abort":
            raise LayoutMismatchError(
                f"round {commit.round}: {commit.reason}",
                fix="Every replica must build the same model, in the same precision.",
            )
        self._raise_if_finished(commit.round)
        if commit.reason_for(self.rank) == DRIFTED:
            raise DriftError(
                f"round {commit.round}: replica {self.rank}'s work was {DRIFTED}",
                fix="Restart it (`resume`): it will fetch the agreed state from the store.",
            )

    def _raise_if_finished(self, round_: int) -> None:
        if self.rank in self.finished:
            raise ExchangeError(
                f"replica {self.rank} had left the run before round {round_}",
                fix="Launch a new run to train further.",
            )


def _result(reducer: Reducer) -> RoundResult:
    """Reduce a commit. Everybody gets the same bytes, so everybody finds the same ones unusable."""
    if reducer.commit.decision != "commit":
        return RoundResult(reducer.commit, None)
    payload = reducer.reduce()
    segments = (payload[s.start : s.stop].view(s.dtype) for s in reducer.layout.segments)
    if not all(map(all_finite, segments)):
        return RoundResult(reducer.commit, None)
    return RoundResult(reducer.commit, reducer.layout.unpack(payload))
