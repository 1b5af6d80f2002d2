"""Reducing the contributions of a commit to one payload, the same bytes on every replica.

The reduced value of an element is ``sum_i w_i x_i / sum_i w_i`` over the contributors in commit
order, added in fp32 and rounded once to the tensor's dtype (``w`` scaled so that the largest is
1, which makes equal weights a plain mean). It depends on the commit alone, so whoever computes it
gets the same bits, and either plan gives the same result:

* all-gather: everybody reads every contribution, (N-1)S down;
* sharded: contributor k reduces shard k and creates ``sum/k``; everybody reads the sums,
  2S(N-1)/N down whatever N. A shard whose owner does not deliver is done by whoever waits for it.
  If a contribution turns out to be damaged, the shard's object says so instead, once and for all,
  and the round has no mean.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from diloco_cloud import keys
from diloco_cloud.errors import (
    AlreadyExistsError,
    CorruptContributionError,
    NotFoundError,
    RoundTimeoutError,
)
from diloco_cloud.exchange.agreement import Watch, newer_snapshots
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.contribution import Header, checksums
from diloco_cloud.exchange.layout import TensorLayout, byte_view
from diloco_cloud.exchange.payloads import (
    PARALLEL_READS,
    Payloads,
    ahead,
    as_tensor,
    read_header,
)
from diloco_cloud.store.base import ObjectInfo, ObjectStore

logger = logging.getLogger(__name__)

#: A shard's owner is waited for this many times as long as this replica needed for its own.
_PATIENCE = 3.0
#: Characters of the reason in an object that stands for a shard that cannot be had.
_LONGEST_NOTE = 400


class NoMeanError(Exception):
    """The round has no mean, for every replica alike; the message says why."""


@dataclass
class Reducer:
    """Computes one commit's result.

    Attributes:
        payloads: the contributions.
        patience_s: how long a shard's owner is waited for at least before this replica does the
            shard.
        new_watch: makes the watch that paces and bounds the wait for the others' shards.
    """

    store: ObjectStore
    commit: Commit
    layout: TensorLayout
    payloads: Payloads
    new_watch: Callable[[], Watch]
    patience_s: float = 1.0

    def reduce(self) -> torch.Tensor:
        """The reduced payload: uint8, shape (layout.nbytes,).

        Raises:
            NoMeanError: a contribution is damaged, and the replicas have agreed that it is.
            RoundTimeoutError: a shard did not appear and could not be computed in time.
            CorruptContributionError: a committed contribution is damaged, for this replica.
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
        commit = self.commit
        list(pool.map(lambda one: self.payloads.header(commit, one), commit.contributors))

        def read(chunk: int, index: int) -> torch.Tensor:
            return self.payloads.chunk(commit, commit.contributors[index], chunk)

        pending = ahead(pool, read, chunks, tuple(range(len(commit.contributors))))
        for chunk in chunks:
            self._mean(payload, chunk, [next(pending).result() for _ in commit.contributors])

    def _mean(self, payload: torch.Tensor, chunk: int, parts: list[torch.Tensor]) -> None:
        """Weighted mean of one chunk, dtype by dtype."""
        weights = self.commit.weights
        total = sum(weights)
        start = chunk * self.commit.chunk_bytes
        for segment, low, high in self.layout.within(start, self.commit.chunk_bytes):
            into = payload[start + low : start + high].view(segment.dtype)
            sums = torch.zeros(into.shape, dtype=segment.accumulator)
            for part, weight in zip(parts, weights, strict=True):
                values = part[low:high].view(segment.dtype).to(segment.accumulator)
                # A product and a sum, each rounded: add_(alpha=) is one fused step on some CPUs
                # and two on others, and the bits would depend on who reduces.
                sums.add_(values if weight == 1 else values * weight)
            into.copy_(sums.div_(total))

    # -- sums ----------------------------------------------------------------------------------

    def _gather_sums(self, payload: torch.Tensor, pool: ThreadPoolExecutor) -> None:
        """Do the own shard, then read the others as they appear, or do them too."""
        todo = set(range(self.commit.shards))
        working = self.new_watch()
        for shard in range(self.commit.shards):
            if self.payloads.is_own(self.commit.contributors[shard]):
                self._make_sum(payload, shard, pool)
                todo.discard(shard)
        patience_s = max(self.patience_s, _PATIENCE * working.waited_s)
        watch = self.new_watch()
        while todo:
            for shard, info in self._listed_sums().items():
                if shard in todo:
                    self._take_sum(payload, shard, info, pool)
                    todo.discard(shard)
            if not todo:
                return
            if watch.waited_s >= patience_s:
                self._make_sum(payload, min(todo), pool)
                todo.discard(min(todo))
                continue
            if watch.expired:
                raise RoundTimeoutError(f"round {self.commit.round}: shards {sorted(todo)} missing")
            watch.pause()

    def _make_sum(self, payload: torch.Tensor, shard: int, pool: ThreadPoolExecutor) -> None:
        start, stop = self._shard_span(shard)
        body, note = byte_view(payload[start:stop]), ""
        try:
            self._reduce_chunks(payload, self._shard_chunks(shard), pool)
        except (CorruptContributionError, NotFoundError) as error:
            if isinstance(error, NotFoundError) and newer_snapshots(self.store, self.commit.round):
                raise  # Not damaged: the others are done with the round.
            # Nobody can have this shard's sum, unless it is there: whichever comes first stands.
            body, note = memoryview(b""), error.message
        header = Header(
            kind="void" if note else "sum",
            run=self.commit.run,
            round=self.commit.round,
            fragment=self.commit.fragment,
            rank=shard,
            attempt=0,
            layout=self.commit.digest,
            nbytes=len(body),
            note=note[:_LONGEST_NOTE],
            chunk_bytes=self.commit.chunk_bytes,
            checksums=checksums([body], self.commit.chunk_bytes, self.payloads.signer),
        ).sign(self.payloads.signer)
        key = keys.shard(self.commit.round, self.commit.fragment, shard)
        try:
            self.store.create(key, [header.encode(), body])
        except AlreadyExistsError:
            # Somebody did this shard meanwhile. What is stored is what all others read.
            self._take_sum(payload, shard, self.store.head(key), pool)
        else:
            if note:
                raise NoMeanError(note)

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
        signer = self.payloads.signer
        header, _ = read_header(self.store, info, stop - start, self.commit.chunk_bytes, signer)
        commit = self.commit
        if header.place != (commit.run, commit.round, commit.fragment, shard, 0):
            raise CorruptContributionError(f"{info.key}: another shard's, or another round's")
        if (header.kind, header.layout) == ("void", self.commit.digest):
            raise NoMeanError(header.note)
        if (header.kind, header.layout, header.nbytes) != ("sum", self.commit.digest, stop - start):
            raise CorruptContributionError(f"{info.key}: not a sum of this round's commit")

        def read(chunk: int) -> torch.Tensor:
            low, high = header.chunk_span(chunk)
            data = self.store.get_range(info.key, header.size + low, high - low)
            header.verify(chunk, data, info.key, signer)
            return as_tensor(data)

        pending = ahead(pool, lambda chunk, _: read(chunk), range(header.chunks), (None,))
        for chunk, data in zip(range(header.chunks), pending, strict=True):
            low, high = header.chunk_span(chunk)
            payload[start + low : start + high] = data.result()
