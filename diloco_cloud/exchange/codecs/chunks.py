"""A contribution's chunks: from the tensors' own bytes to encoded ones, and back.

A chunk is cut from the raw payload (:class:`TensorLayout`), so that chunk k holds the same elements
whatever the codec. A codec sees its elements as fp32, of whichever dtypes they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass

import torch

from diloco_cloud.exchange.codecs.base import Codec, Data, overlap
from diloco_cloud.exchange.codecs.feedback import Feedback
from diloco_cloud.exchange.layout import TensorLayout

#: Reads the raw bytes of a chunk: uint8, shape (bytes of the chunk,), only to be read.
ReadChunk = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Chunks:
    """The chunks of a raw payload.

    Attributes:
        layout: of the payload.
        chunk_bytes: of each, but for the last; a multiple of 8.
    """

    layout: TensorLayout
    chunk_bytes: int

    def __len__(self) -> int:
        return -(-self.layout.nbytes // self.chunk_bytes)

    def span(self, chunk: int) -> tuple[int, int]:
        """First and last-plus-one byte of a chunk in the raw payload."""
        start = chunk * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.layout.nbytes)

    def elements(self, chunk: int) -> tuple[int, int]:
        """First and last-plus-one element of a chunk, in payload order."""
        start, stop = self.span(chunk)
        return self._elements_before(start), self._elements_before(stop)

    def numel(self, chunk: int) -> int:
        """Elements of a chunk."""
        start, stop = self.elements(chunk)
        return stop - start

    def values(self, chunk: int, raw: torch.Tensor) -> torch.Tensor:
        """A chunk's elements as fp32, shape (numel,); a copy only where they are not fp32."""
        start, stop = self.span(chunk)
        parts = [
            raw[low:high].view(segment.dtype).to(torch.float32)
            for segment, low, high in self.layout.within(start, stop - start)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def write(self, chunk: int, values: torch.Tensor, payload: torch.Tensor) -> None:
        """Write a chunk's elements into a raw payload, each rounded to its dtype."""
        start, stop = self.span(chunk)
        done = 0
        for segment, low, high in self.layout.within(start, stop - start):
            into = payload[start + low : start + high].view(segment.dtype)
            into.copy_(values[done : done + len(into)])
            done += len(into)

    def _elements_before(self, byte: int) -> int:
        return sum(
            (min(byte, segment.stop) - segment.start) // segment.dtype.itemsize
            for segment in self.layout.segments
            if segment.start < byte
        )


def encode(
    codec: Codec,
    chunks: Chunks,
    read: ReadChunk,
    feedback: Feedback | None = None,
    pool: Executor | None = None,
    keep: Callable[[int, memoryview], memoryview] = lambda _chunk, encoded: encoded,
) -> list[memoryview]:
    """Encode every chunk of a payload; nothing is changed.

    Args:
        codec: encodes.
        chunks: of the payload.
        read: its raw bytes.
        feedback: the residual that goes with it.
        pool: encodes several chunks at once. The bytes are the same.
        keep: told of each chunk, when nobody reads its values any more; makes what is returned.
    """

    spare = _Spare()

    def one(chunk: int) -> memoryview:
        values = chunks.values(chunk, read(chunk))
        if feedback is None:
            return keep(chunk, codec.encode(values))
        into = spare.take(len(values))
        encoded = codec.encode(feedback.added_to(values, chunks.elements(chunk)[0], into))
        spare.give_back(into, encoded)
        return keep(chunk, encoded)

    return list((map if pool is None else pool.map)(one, range(len(chunks))))


class _Spare:
    """Memory for fp32 values, used again: new memory is met by page faults, and leaves holes."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, numel: int) -> torch.Tensor:
        """Some of it; it is nobody else's until it is given back."""
        with suppress(IndexError):
            found = self._free.pop()
            if len(found) >= numel:
                return found[:numel]
        return torch.empty(numel)

    def give_back(self, values: torch.Tensor, encoded: memoryview) -> None:
        """Have it used again, unless ``encoded`` is some of it."""
        if not overlap(encoded, values):
            self._free.append(values)


def settle(
    codec: Codec,
    chunks: Chunks,
    read: ReadChunk,
    encoded: Sequence[Data],
    feedback: Feedback,
    pool: Executor | None = None,
) -> None:
    """Keep what remains of a contribution, now that a round's mean has it.

    Args:
        codec: as :func:`encode` was given it.
        chunks: likewise.
        read: likewise.
        encoded: what it returned.
        feedback: the residual that went with it.
        pool: settles several chunks at once. The residual is the same.
    """

    def one(chunk: int) -> None:
        settle_chunk(codec, chunks, read, encoded, feedback, chunk)

    for _ in (map if pool is None else pool.map)(one, range(len(encoded))):
        pass


def settle_chunk(
    codec: Codec,
    chunks: Chunks,
    read: ReadChunk,
    encoded: Sequence[Data],
    feedback: Feedback,
    chunk: int,
) -> None:
    """Do what :func:`settle` does for one chunk; arguments as there."""
    values = chunks.values(chunk, read(chunk))
    feedback.settle(values, chunks.elements(chunk)[0], codec, encoded[chunk])
