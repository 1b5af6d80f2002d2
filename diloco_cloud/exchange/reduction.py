"""Reducing the contributions of a commit: the same bytes on every replica.

The reduced value of an element is its weighted mean over the contributors in commit order
(:mod:`.means`). It depends on the commit alone, so whoever computes it gets the same bits:

* all-gather: everybody reads every contribution, (N-1)S down; for what is small, compressed more
  than N/2 times, or for two. What is large is read while it is on its way (:mod:`.allgathering`);
* sharded: contributor k averages every N-th chunk and stores it; everybody reads the means,
  2S(N-1)/N down whatever N (:mod:`.gathering`). Chunks whose owner does not deliver are done by
  whoever waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from diloco_cloud.errors import CorruptContributionError
from diloco_cloud.exchange.allgathering import AllGathering
from diloco_cloud.exchange.buffers import ChunkedBytes
from diloco_cloud.exchange.commit import Commit, Contributor
from diloco_cloud.exchange.contribution import Header
from diloco_cloud.exchange.gathering import Gathering
from diloco_cloud.exchange.heaps import FreedMemory
from diloco_cloud.exchange.layout import TensorLayout, all_finite, byte_view
from diloco_cloud.exchange.means import ChunkMeans
from diloco_cloud.exchange.merging import rescale
from diloco_cloud.exchange.payloads import Payloads, ahead, reading_ahead
from diloco_cloud.exchange.sums import NoMeanError, Sums
from diloco_cloud.exchange.watch import Watch
from diloco_cloud.exchange.work import RoundResult
from diloco_cloud.store.base import ObjectStore

#: Tensors on the host, and their bytes.
Destination: TypeAlias = tuple[list[torch.Tensor], ChunkedBytes]


@dataclass
class Reducer:
    """Computes one commit's means.

    Attributes:
        commit: the decision, or one that is expected.
        layout: of the tensors.
        payloads: the contributions.
        into: where the means go.
        new_watch: makes the watch that paces and bounds the wait for the others' means.
        patience_s: how long a chunk's owner is waited for at least before this replica does it.
        given_up: whether whoever asked for the means has stopped waiting for them.
    """

    store: ObjectStore
    commit: Commit
    layout: TensorLayout
    payloads: Payloads
    into: ChunkedBytes
    new_watch: Callable[[], Watch]
    patience_s: float = 1.0
    given_up: Callable[[], bool] = lambda: False

    def reduce(self) -> None:
        """Write the means into :attr:`into`.

        Raises:
            NoMeanError: a contribution is damaged, and the replicas have agreed that it is.
            RoundTimeoutError: a chunk did not appear and could not be averaged in time.
            CorruptContributionError: a committed contribution is damaged, for this replica.
            NotFoundError: a committed contribution has been deleted.
        """
        if (self.commit.layout, self.commit.nbytes) != (self.layout.digest, self.layout.nbytes):
            raise CorruptContributionError(
                f"round {self.commit.round} was committed for other tensors than this replica's"
            )
        if self.commit.plan == "sharded":
            self.gathering(given_up=self.given_up).run()
        else:
            self._read_all()

    def gathering(
        self, *, ahead: bool = False, given_up: Callable[[], bool] = lambda: False
    ) -> Gathering:
        """What carries out the plan chunk by chunk; see there."""
        means = ChunkMeans(self.commit, self.layout, self.payloads.processor)
        kind = Gathering if self.commit.plan == "sharded" else AllGathering
        return kind(
            commit=self.commit,
            payloads=self.payloads,
            sums=Sums(self.store, self.commit, means, self.payloads.signer),
            into=self.into,
            new_watch=self.new_watch,
            patience_s=self.patience_s,
            ahead=ahead,
            given_up=given_up,
        )

    def _read_all(self) -> None:
        """Average every chunk here, reading ahead."""
        commit = self.commit
        means = ChunkMeans(commit, self.layout, self.payloads.processor)

        def header(one: Contributor) -> Header:
            return self.payloads.header(commit, one)

        def read(block: range, one: Contributor) -> list[torch.Tensor]:
            return self.payloads.chunks(commit, one, block)

        parallel = self.payloads.parallel
        with ThreadPoolExecutor(parallel, "diloco-read") as pool:
            headers = list(pool.map(header, commit.contributors))
            blocks, window = reading_ahead(headers, parallel)
            pending = ahead(pool, read, blocks, commit.contributors, window)
            freed = FreedMemory(commit.nbytes)
            for block in blocks:
                found = [next(pending).result() for _ in commit.contributors]
                for chunk, *parts in zip(block, *found, strict=True):
                    means.write(chunk, parts, self.into.write)
                del found, parts  # Before the next ones are waited for.
                freed.check()


def memory_for(layout: TensorLayout, chunk_bytes: int) -> tuple[torch.Tensor, ChunkedBytes]:
    """New memory for means: uint8, shape (layout.nbytes,); and the same in chunks."""
    # numpy asks for huge pages: in small ones, 64 MiB are met by 16384 page faults.
    payload = torch.from_numpy(np.empty(layout.nbytes, np.uint8))
    return payload, ChunkedBytes([byte_view(payload)], chunk_bytes)


def reduced(commit: Commit, reduce: Callable[[], None], tensors: list[torch.Tensor]) -> RoundResult:
    """Reduce a commit. Everybody gets the same bytes, so everybody finds the same ones unusable.

    Args:
        commit: the decision.
        reduce: writes the means into ``tensors``.
        tensors: contiguous.
    """
    if commit.decision != "commit":
        return RoundResult(commit, None, commit.reason)
    try:
        reduce()
    except NoMeanError as error:
        return RoundResult(commit, None, str(error))
    if commit.norms and len(commit.norms) != len(tensors):
        return RoundResult(commit, None, "the contributions' norms are of other tensors")
    if commit.norms:
        rescale(tensors, commit.norms)
    if not all(map(all_finite, tensors)):
        return RoundResult(commit, None, "the mean has NaN or infinite values")
    return RoundResult(commit, tensors)
