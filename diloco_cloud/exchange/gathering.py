"""The sharded plan: each chunk is averaged by one replica, and read by all.

What is averaged is listed as it arrives, so that uploads, downloads and additions go on at the same
time, one chunk each. Reading comes in two kinds, and what others wait for goes first: parts of the
chunks that are this replica's to average, then the means of all others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Semaphore
from typing import Any

import torch

from diloco_cloud import keys
from diloco_cloud.errors import (
    CorruptContributionError,
    ExchangeError,
    RoundTimeoutError,
)
from diloco_cloud.exchange.buffers import ChunkedBytes
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.heaps import FreedMemory
from diloco_cloud.exchange.payloads import Payloads
from diloco_cloud.exchange.sums import Sums
from diloco_cloud.exchange.watch import Watch

logger = logging.getLogger(__name__)

#: Own chunks whose parts are read at the same time. One more than is averaged keeps the link busy.
_WINDOW = 2
#: A chunk's owner is waited for this many times as long as this replica needed for its own.
_PATIENCE = 3.0
#: Between two listings while there is something to do meanwhile, in seconds.
SHORTEST_S = 0.05
SLOWER = 1.5


@dataclass
class Gathering:
    """Brings the mean of every chunk of a commit into memory.

    Attributes:
        commit: the decision, or the one that is expected.
        payloads: the contributions.
        sums: reads and writes means.
        into: where the means go.
        new_watch: makes the watch that paces and bounds the waits.
        patience_s: how long an owner is waited for at least before this replica does its chunks.
        ahead: the commit is only expected: its contributions are still arriving, and nothing is
            wrong with what is missing. May be set to False while :meth:`run` is under way.
        given_up: ends :meth:`run` with ``ExchangeError``.
    """

    commit: Commit
    payloads: Payloads
    sums: Sums
    into: ChunkedBytes
    new_watch: Callable[[], Watch]
    patience_s: float = 1.0
    ahead: bool = False
    given_up: Callable[[], bool] = lambda: False
    _watch: Watch = field(init=False)
    _todo: set[int] = field(init=False)
    _mine: list[int] = field(init=False)
    _place: int | None = field(default=None, init=False)
    _offset: int = field(default=0, init=False)
    _arrived: dict[int, set[tuple[int, int]]] = field(default_factory=dict, init=False)
    _parts: dict[int, dict[int, Future[torch.Tensor]]] = field(default_factory=dict, init=False)
    _there: dict[int, int] = field(default_factory=dict, init=False)
    _under_way: dict[Future[None], int] = field(default_factory=dict, init=False)
    #: Means that were read are decoded by few at a time: what they become is larger.
    _decoders: Semaphore = field(default_factory=lambda: Semaphore(_WINDOW), init=False)
    _period_s: float = field(default=SHORTEST_S, init=False)
    _looked_at: float | None = field(default=None, init=False)
    _progress_at: float = field(init=False)
    _own_s: float = field(default=0.0, init=False)
    _freed: FreedMemory = field(init=False)

    def __post_init__(self) -> None:
        self._watch = self.new_watch()
        self._freed = FreedMemory(self.commit.nbytes)
        self._progress_at = self._watch.clock.now()
        chunks, contributors = len(self.into), self.commit.contributors
        self._todo = set(range(chunks))
        own = [k for k, one in enumerate(contributors) if self.payloads.is_own(one)]
        self._offset = own[0] * chunks // len(contributors) if own else 0
        if own and own[0] < self.commit.shards and not self.commit.reducers:
            self._place = own[0]
        self._mine = self._group(self._place)

    def _group(self, place: int | None) -> list[int]:
        """The chunks of a shard."""
        return [] if place is None else list(range(place, len(self.into), self.commit.shards))

    def run(self) -> None:
        """Gather everything.

        Raises:
            NoMeanError: a contribution is damaged, and the replicas have agreed that it is.
            RoundTimeoutError: a chunk did not appear and could not be averaged in time.
            CorruptContributionError: a committed contribution is damaged, for this replica.
            NotFoundError: a committed contribution has been deleted.
            ExchangeError: it was given up.
        """
        reads = ThreadPoolExecutor(self.payloads.parallel, "diloco-read")
        means = ThreadPoolExecutor(_WINDOW, "diloco-mean")
        try:
            while self._todo:
                if self.given_up():
                    raise ExchangeError("the round went another way")
                self._look()
                self._begin_own(reads, means)
                self._begin_reading(reads)
                self._await()
        finally:
            for pool in (means, reads):
                pool.shutdown(cancel_futures=True)

    # -- what there is -------------------------------------------------------------------------

    def _look(self) -> None:
        """List what has arrived, when it is time again and there is room for more."""
        now = self._watch.clock.now()
        if self._looked_at is not None and now - self._looked_at < self._period_s:
            return
        if len(self._under_way) + len(self._parts_under_way) >= self.payloads.parallel:
            return  # There is enough to do as it is.
        self._looked_at = now
        seen, ready = self._seen, sum(chunk in self._todo for chunk in self._there)
        if self._lacks_parts:
            self._list_parts()
        if ready < self.payloads.parallel:
            self._there = self.sums.listed()
        if self._seen > seen:
            self._period_s, self._progress_at = SHORTEST_S, now
        else:
            self._period_s = min(SLOWER * self._period_s, self._watch.longest_s)

    @property
    def _lacks_parts(self) -> bool:
        """Whether anything of the own chunks whose turn it is has yet to be seen."""
        whole = len(self.commit.contributors)
        return self.ahead and any(len(self._arrived.get(c, ())) < whole for c in self._window)

    @property
    def _window(self) -> list[int]:
        return [chunk for chunk in self._mine if chunk in self._todo][:_WINDOW]

    @property
    def _seen(self) -> int:
        return len(self._there) + sum(map(len, self._arrived.values()))

    def _list_parts(self) -> None:
        assert self._place is not None
        group = keys.parts(self.commit.round, self.commit.fragment, self._place)
        for info in self.payloads.store.list(group):
            found = keys.parse_streamed(info.key)
            if found is not None:
                chunk, *life = found
                self._arrived.setdefault(chunk, set()).add((life[0], life[1]))

    def _has_arrived(self, chunk: int, index: int) -> bool:
        one = self.commit.contributors[index]
        return not self.ahead or (one.rank, one.attempt) in self._arrived.get(chunk, ())

    # -- what is begun -------------------------------------------------------------------------

    def _begin_own(self, reads: ThreadPoolExecutor, means: ThreadPoolExecutor) -> None:
        """Read what has arrived of the next own chunks, and average those that are whole."""
        busy = set(self._under_way.values())
        for chunk in self._window:
            if chunk in busy or chunk in self._there:
                continue
            parts = self._parts.setdefault(chunk, {})
            for index, one in enumerate(self.commit.contributors):
                if index not in parts and self._has_arrived(chunk, index):
                    parts[index] = reads.submit(self.payloads.chunk, self.commit, one, chunk)
            if len(parts) == len(self.commit.contributors):
                in_order = [parts[index] for index in range(len(parts))]
                del self._parts[chunk]
                self._under_way[means.submit(self._average, chunk, in_order)] = chunk

    def _average(self, chunk: int, parts: list[Future[torch.Tensor]]) -> None:
        # A part that has been added is let go of at once.
        in_order = (parts.pop(0).result() for _ in range(len(parts)))
        self._put(chunk, self.sums.make(chunk, in_order, final=not self.ahead))

    def _begin_reading(self, reads: ThreadPoolExecutor) -> None:
        """Read means, as far as that does not keep parts waiting."""
        busy = set(self._under_way.values())
        room = self.payloads.parallel - len(self._under_way) - len(self._parts_under_way)
        for chunk, size in self._there.items():
            if room > 0 and chunk in self._todo and chunk not in busy:
                self._under_way[reads.submit(self._read, chunk, size)] = chunk
                room -= 1

    def _read(self, chunk: int, size: int) -> None:
        body = self.sums.body(chunk, size)
        with self._decoders:
            self._put(chunk, self.sums.means.from_sum(chunk, body))

    def _put(self, chunk: int, mean: torch.Tensor) -> None:
        """Put a mean in its place, in the thread that has it: no chunk is done by two at once."""
        own = self.payloads.own
        if own is not None and own.raw is self.into:
            own.overwritten.add(chunk)
        with self.payloads.processor.decoding():
            self.into.write(chunk, mean)

    # -- what comes of it ----------------------------------------------------------------------

    def _await(self) -> None:
        """Take in what is ready; where nothing is under way, pause, or do what others should."""
        waiting: list[Future[Any]] = [*self._under_way, *self._parts_under_way]
        if waiting:
            done, _ = wait(waiting, timeout=self._period_s, return_when=FIRST_COMPLETED)
            for future in done & self._under_way.keys():
                self._take_in(future)
        elif self._todo:
            self._be_patient()

    @property
    def _parts_under_way(self) -> list[Future[torch.Tensor]]:
        return [
            part for parts in self._parts.values() for part in parts.values() if not part.done()
        ]

    def _take_in(self, future: Future[None]) -> None:
        chunk = self._under_way.pop(future)
        self._freed.check()
        try:
            future.result()
        except CorruptContributionError as error:
            if self.ahead:
                raise
            # What is stored is no mean of this commit, which pins what is.
            logger.warning("%s; averaging it here", error.message)
            self._put(chunk, self._make_again(chunk))
        self._todo.discard(chunk)
        self._parts.pop(chunk, None)  # Somebody else may have been faster.
        self._progress_at = self._watch.clock.now()
        if chunk in self._mine:
            self._own_s = self._watch.waited_s

    def _make_again(self, chunk: int) -> torch.Tensor:
        return self.sums.compute(chunk, self._read_parts(chunk))

    def _read_parts(self, chunk: int) -> list[torch.Tensor]:
        return [self.payloads.chunk(self.commit, one, chunk) for one in self.commit.contributors]

    def _be_patient(self) -> None:
        now = self._watch.clock.now()
        if not self.ahead:
            patience_s = max(self.patience_s, _PATIENCE * self._own_s / max(len(self._mine), 1))
            if now - self._progress_at >= patience_s:
                self._take_over()
                return
            if self._watch.expired:
                missing = sorted(self._todo)
                raise RoundTimeoutError(f"round {self.commit.round}: chunks {missing} are missing")
        self._watch.pause(self._period_s)

    def _take_over(self) -> None:
        """Do a chunk that its owner does not deliver; the others begin with other ones."""
        missing = sorted(self._todo - set(self._mine))
        if missing:
            self._mine.append(next((c for c in missing if c >= self._offset), missing[0]))
        self._looked_at = None
