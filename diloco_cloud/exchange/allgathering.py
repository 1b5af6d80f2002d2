"""The all-gather of large contributions: everybody averages a chunk as soon as all have sent it.

Nothing is stored but the contributions, and nobody waits for anybody's means; the bits are those of
an all-gather that begins after the decision.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch

from diloco_cloud.exchange.gathering import SHORTEST_S, SLOWER, Gathering
from diloco_cloud.exchange.streamed import columns, columns_a_look


@dataclass
class AllGathering(Gathering):
    """Brings the mean of every chunk into memory, each made here.

    Chunks are taken in any order, but each only when all contributors have stored it: one that is
    late keeps nothing else waiting, and no more is held than is being averaged.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._place = 0  # There is one group, and it is everybody's.
        self._mine = list(range(len(self.into)))

    @cached_property
    def _at_once(self) -> int:
        """Chunks that are read at once."""
        headers = [self.payloads.header(self.commit, one) for one in self.commit.contributors]
        largest = max(header.chunk_size(chunk) for header in headers for chunk in self._mine)
        return columns(self.payloads.parallel, (len(headers) - 1) * largest)

    @property
    def _window(self) -> list[int]:
        whole = (chunk for chunk in self._mine if chunk in self._todo and self._is_whole(chunk))
        return list(islice(whole, self._at_once))

    def _is_whole(self, chunk: int) -> bool:
        return all(self._has_arrived(chunk, k) for k in range(len(self.commit.contributors)))

    def _look(self) -> None:
        """List what has arrived, when it is time again and there is room for more.

        The pauses follow the pace at which chunks come: each listing names all that are there.
        """
        now = self._watch.clock.now()
        is_early = self._looked_at is not None and now - self._looked_at < self._period_s
        if not self.ahead or is_early or len(self._window) >= self._at_once:
            return
        self._looked_at, before = now, self._seen
        self._list_parts()
        new = (self._seen - before) / len(self.commit.contributors)
        wanted = columns_a_look(self._at_once, len(self.into))
        pace = SLOWER if new * SLOWER <= wanted else wanted / new
        self._period_s = min(max(SHORTEST_S, pace * self._period_s), self._watch.longest_s)

    def _average(self, chunk: int, parts: list[Future[torch.Tensor]]) -> None:
        in_order = (parts.pop(0).result() for _ in range(len(parts)))
        self.sums.means.write(chunk, in_order, self._put)
        if self.payloads.own is not None:
            self.payloads.own.release(chunk)  # All that is averaged has been sent.

    def _make_again(self, chunk: int) -> torch.Tensor:
        return self.sums.means.mean(chunk, self._read_parts(chunk))
