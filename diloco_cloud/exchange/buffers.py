"""Tensors' bytes, cut into chunks that are read and written where they lie."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from diloco_cloud.errors import CorruptContributionError


class ChunkedBytes:
    """The concatenation of byte views, in chunks.

    Args:
        views: of memory that this object does not own.
        chunk_bytes: of each chunk but the last.
    """

    def __init__(self, views: Sequence[memoryview], chunk_bytes: int) -> None:
        self._views = [view for view in views if len(view)]
        self._starts = [0, *accumulate(map(len, self._views))]
        self._chunk_bytes = chunk_bytes

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self._starts[-1]

    def __len__(self) -> int:
        return -(-self.nbytes // self._chunk_bytes)

    @property
    def is_disjoint(self) -> bool:
        """Whether no two of the views have memory in common."""
        spans = sorted((as_tensor(view).data_ptr(), len(view)) for view in self._views)
        return all(start + size <= other for (start, size), (other, _) in pairwise(spans))

    def pieces(self, chunk: int, most: int | None = None) -> Iterator[memoryview]:
        """The views' parts that make up a chunk, or its first ``most`` bytes, in order."""
        at = chunk * self._chunk_bytes
        stop = min(at + self._chunk_bytes, self.nbytes)
        if most is not None:
            stop = min(stop, at + most)
        index = bisect_right(self._starts, at) - 1
        while at < stop:
            start, end = self._starts[index], min(self._starts[index + 1], stop)
            yield self._views[index][at - start : end - start]
            at, index = end, index + 1

    def read(self, chunk: int, most: int | None = None) -> torch.Tensor:
        """A chunk's bytes, or its first ``most``: uint8, only to be read.

        A copy only where they lie across views.
        """
        pieces = [as_tensor(piece) for piece in self.pieces(chunk, most)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def write(self, chunk: int, data: torch.Tensor) -> None:
        """Replace a chunk's bytes by ``data``, uint8 of the same length.

        Raises:
            CorruptContributionError: of another length.
        """
        if len(data) != sum(map(len, self.pieces(chunk))):
            raise CorruptContributionError(f"chunk {chunk} has {len(data)} bytes")
        self.begin_with(chunk, data)

    def begin_with(self, chunk: int, data: torch.Tensor) -> bool:
        """Replace a chunk's first bytes by ``data``, uint8; whether it has room for them."""
        pieces = list(self.pieces(chunk, len(data)))
        if len(data) > sum(map(len, pieces)):
            return False
        at = 0
        for piece in pieces:
            as_tensor(piece).copy_(data[at : at + len(piece)])
            at += len(piece)
        return True


def as_tensor(data: memoryview) -> torch.Tensor:
    """``data`` as a uint8 tensor over the same memory; a read-only one is only ever read.

    torch has no read-only tensors and warns about a read-only buffer, which is what a client hands
    out; the address is passed instead, with the buffer kept alive by the array that views it.
    """
    if not data.readonly:
        return torch.frombuffer(data, dtype=torch.uint8)
    address = np.frombuffer(data, dtype=np.uint8).ctypes.data
    array = (ctypes.c_ubyte * len(data)).from_address(address)
    array.owner = data  # type: ignore[attr-defined]
    return torch.frombuffer(array, dtype=torch.uint8)
