"""Reducing the contributions of a commit to one payload, the same bytes on every replica.

The reduced value of an element is ``sum_i w_i x_i / sum_i w_i`` over the contributors in commit
order, added in fp32 and rounded once to the tensor's dtype (``w`` scaled so that the largest is
1, which makes equal weights a plain mean). It depends on the commit alone, so whoever computes it
gets the same bits, and either plan gives the same result:

* all-gather: everybody reads every contribution, (N-1)S down;
* sharded: contributor k reduces shard k and creates ``sum/k``; everybody reads the sums,
  2S(N-1)/N down whatever N. A shard whose owner does not deliver is done by whoever waits for it.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from diloco_cloud import keys
from diloco_cloud.errors import AlreadyExistsError, CorruptContributionError, RoundTimeoutError
from diloco_cloud.exchange.agreement import PARALLEL_READS, Watch, read_header
from diloco_cloud.exchange.commit import Commit, Contributor
from diloco_cloud.exchange.contribution import Header, checksums, header_size
from diloco_cloud.exchange.layout import TensorLayout, byte_view
from diloco_cloud.store.base import ObjectInfo, ObjectStore

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass
class Reducer:
    """Computes one commit's result.

    Attributes:
        own: this replica's contribution as (header, payload views), if the commit names it; spares
            reading it back, because create-once made the stored bytes equal to these.
        headers: contributions' headers that were read already, by digest.
        patience_s: how long a shard's owner is waited for before this replica does the shard.
        new_watch: makes the watch that paces and bounds the wait for the others' shards.
    """

    store: ObjectStore
    commit: Commit
    layout: TensorLayout
    new_watch: Callable[[], Watch]
    patience_s: float = 5.0
    own: tuple[Header, list[memoryview]] | None = None
    headers: dict[str, Header] = field(default_factory=dict)

    def reduce(self) -> torch.Tensor:
        """The reduced payload: uint8, shape (layout.nbytes,).

        Raises:
            RoundTimeoutError: a shard did not appear and could not be computed in time.
            CorruptContributionError: a committed contribution is damaged.
            NotFoundError: a committed contribution has been deleted.
        """
        if (self.commit.layout, self.commit.nbytes) != (self.layout.digest, self.layout.nbytes):
            raise CorruptContributionError(
                f"round {self.commit.round} was committed for other tensors than this replica's"
            )
        payload = torch.empty(self.layout.nbytes, dtype=torch.uint8)
        with ThreadPoolExecutor(PARALLEL_READS, "diloco-read") as pool:
            if self.commit.plan == "sharded":
                self._gather_sums(payload, pool)
            else:
                self._reduce_chunks(payload, range(self._chunks), pool)
        return payload

    @property
    def _chunks(self) -> int:
        return -(-self.layout.nbytes // self.commit.chunk_bytes)

    def _shard_chunks(self, shard: int) -> range:
        """Chunks of a shard: contiguous, as equal as whole chunks allow."""
        return range(
            shard * self._chunks // self.commit.shards,
            (shard + 1) * self._chunks // self.commit.shards,
        )

    # -- contributions -------------------------------------------------------------------------

    def _reduce_chunks(
        self, payload: torch.Tensor, chunks: range, pool: ThreadPoolExecutor
    ) -> None:
        """Write the reduced bytes of ``chunks`` into ``payload``, reading ahead."""
        list(pool.map(self._header, self.commit.contributors))
        pending = _ahead(pool, self._read_chunk, chunks, self.commit.contributors)
        for chunk in chunks:
            parts = [next(pending).result() for _ in self.commit.contributors]
            self._mean(payload, chunk, parts)

    def _mean(self, payload: torch.Tensor, chunk: int, parts: list[torch.Tensor]) -> None:
        """Weighted mean of one chunk, dtype by dtype."""
        weights = self.commit.weights
        total = sum(weights)
        start = chunk * self.commit.chunk_bytes
        stop = min(start + self.commit.chunk_bytes, self.layout.nbytes)
        for segment in self.layout.segments:
            low, high = max(segment.start, start), min(segment.stop, stop)
            if low >= high:
                continue
            into = payload[low:high].view(segment.dtype)
            sums = torch.zeros(into.shape, dtype=segment.accumulator)
            for part, weight in zip(parts, weights, strict=True):
                values = part[low - start : high - start].view(segment.dtype)
                values = values.to(segment.accumulator)
                # A product and a sum, each rounded: add_(alpha=) is one fused step on some CPUs
                # and two on others, and the bits would depend on who reduces.
                sums.add_(values if weight == 1 else values * weight)
            into.copy_(sums.div_(total))

    def _read_chunk(self, chunk: int, contributor: Contributor) -> torch.Tensor:
        header = self._header(contributor)
        start, stop = header.chunk_span(chunk)
        if self.own is not None and self._is_own(contributor):
            return _slice(self.own[1], start, stop)
        key = self._key(contributor)
        data = self.store.get_range(key, header.size + start, stop - start)
        header.verify(chunk, data, key)
        return _tensor(data)

    def _is_own(self, contributor: Contributor) -> bool:
        return self.own is not None and (contributor.rank, contributor.attempt) == (
            self.own[0].rank,
            self.own[0].attempt,
        )

    def _header(self, contributor: Contributor) -> Header:
        """The header the commit names; anything else under its key is refused."""
        if self.own is not None and self._is_own(contributor):
            return self.own[0]
        if contributor.header not in self.headers:
            key, nbytes = self._key(contributor), self.layout.nbytes
            chunk_bytes = self.commit.chunk_bytes
            info = ObjectInfo(key, header_size(nbytes, chunk_bytes) + nbytes, 0.0)
            header, name = read_header(self.store, info, nbytes, chunk_bytes)
            if name != contributor.header:
                raise CorruptContributionError(f"{key}: not the bytes that were committed")
            self.headers[name] = header
        return self.headers[contributor.header]

    def _key(self, contributor: Contributor) -> str:
        commit = self.commit
        return keys.put(commit.round, commit.fragment, contributor.rank, contributor.attempt)

    # -- sums ----------------------------------------------------------------------------------

    def _gather_sums(self, payload: torch.Tensor, pool: ThreadPoolExecutor) -> None:
        """Do the own shard, then read the others as they appear, or do them too."""
        todo = set(range(self.commit.shards))
        for shard in range(self.commit.shards):
            if self._is_own(self.commit.contributors[shard]):
                self._make_sum(payload, shard, pool)
                todo.discard(shard)
        watch = self.new_watch()
        while todo:
            for shard, info in self._listed_sums().items():
                if shard in todo:
                    self._take_sum(payload, shard, info, pool)
                    todo.discard(shard)
            if not todo:
                return
            if watch.waited_s >= self.patience_s:
                self._make_sum(payload, min(todo), pool)
                todo.discard(min(todo))
                continue
            if watch.expired:
                raise RoundTimeoutError(f"round {self.commit.round}: shards {sorted(todo)} missing")
            watch.pause()

    def _make_sum(self, payload: torch.Tensor, shard: int, pool: ThreadPoolExecutor) -> None:
        chunks = self._shard_chunks(shard)
        self._reduce_chunks(payload, chunks, pool)
        start, stop = self._shard_span(shard)
        body = byte_view(payload[start:stop])
        header = Header(
            kind="sum",
            run=self.commit.run,
            round=self.commit.round,
            fragment=self.commit.fragment,
            rank=shard,
            attempt=0,
            layout=self.commit.digest,
            nbytes=stop - start,
            chunk_bytes=self.commit.chunk_bytes,
            checksums=checksums([body], self.commit.chunk_bytes),
        )
        key = keys.shard(self.commit.round, self.commit.fragment, shard)
        try:
            self.store.create(key, [header.encode(), body])
        except AlreadyExistsError:
            # Somebody did this shard meanwhile. What is stored is what all others read.
            self._take_sum(payload, shard, self.store.head(key), pool)

    def _take_sum(
        self, payload: torch.Tensor, shard: int, info: ObjectInfo, pool: ThreadPoolExecutor
    ) -> None:
        """Read a sum; compute it where what is stored is none, since the commit pins its parts."""
        try:
            self._read_sum(payload, shard, info, pool)
        except CorruptContributionError as error:
            logger.warning("%s; reducing it here", error.message)
            self._reduce_chunks(payload, self._shard_chunks(shard), pool)

    def _shard_span(self, shard: int) -> tuple[int, int]:
        chunks = self._shard_chunks(shard)
        size = self.commit.chunk_bytes
        return chunks.start * size, min(chunks.stop * size, self.layout.nbytes)

    def _listed_sums(self) -> Mapping[int, ObjectInfo]:
        prefix = keys.directory(self.commit.round, self.commit.fragment) + "sum/"
        names = {
            keys.shard(self.commit.round, self.commit.fragment, k): k
            for k in range(self.commit.shards)
        }
        return {names[i.key]: i for i in self.store.list(prefix) if i.key in names}

    def _read_sum(
        self, payload: torch.Tensor, shard: int, info: ObjectInfo, pool: ThreadPoolExecutor
    ) -> None:
        start, stop = self._shard_span(shard)
        header, _ = read_header(self.store, info, stop - start, self.commit.chunk_bytes)
        if (header.kind, header.layout, header.nbytes) != ("sum", self.commit.digest, stop - start):
            raise CorruptContributionError(f"{info.key}: not a sum of this round's commit")

        def read(chunk: int) -> torch.Tensor:
            low, high = header.chunk_span(chunk)
            data = self.store.get_range(info.key, header.size + low, high - low)
            header.verify(chunk, data, info.key)
            return _tensor(data)

        pending = _ahead(pool, lambda chunk, _: read(chunk), range(header.chunks), (None,))
        for chunk, data in zip(range(header.chunks), pending, strict=True):
            low, high = header.chunk_span(chunk)
            payload[start + low : start + high] = data.result()


def _ahead(
    pool: ThreadPoolExecutor,
    read: Callable[[int, T], torch.Tensor],
    chunks: range,
    sources: tuple[T, ...],
) -> Iterator[Future[torch.Tensor]]:
    """Futures of ``read(chunk, source)`` in order, keeping a bounded number under way."""
    todo = ((chunk, source) for chunk in chunks for source in sources)
    window = PARALLEL_READS + len(sources)
    under_way: list[Future[torch.Tensor]] = []
    for chunk, source in todo:
        under_way.append(pool.submit(read, chunk, source))
        if len(under_way) >= window:
            yield under_way.pop(0)
    yield from under_way


def _slice(views: list[memoryview], start: int, stop: int) -> torch.Tensor:
    """Bytes ``start:stop`` of the concatenation of ``views``; a copy only across views."""
    found: list[memoryview] = []
    at = 0
    for view in views:
        low, high = max(start - at, 0), min(stop - at, len(view))
        if low < high:
            found.append(view[low:high])
        at += len(view)
    if len(found) == 1:
        return _tensor(found[0])
    joined = torch.empty(stop - start, dtype=torch.uint8)
    at = 0
    for view in found:
        joined[at : at + len(view)] = _tensor(view)
        at += len(view)
    return joined


def _tensor(data: memoryview) -> torch.Tensor:
    """``data`` as a uint8 tensor over the same memory; it is only ever read.

    torch has no read-only tensors and warns about a read-only buffer, which is what a client hands
    out; the address is passed instead, with the buffer kept alive by the array that views it.
    """
    if not data.readonly:
        return torch.frombuffer(data, dtype=torch.uint8)
    address = np.frombuffer(data, dtype=np.uint8).ctypes.data
    array = (ctypes.c_ubyte * len(data)).from_address(address)
    array.owner = data  # type: ignore[attr-defined]
    return torch.frombuffer(array, dtype=torch.uint8)
