"""The weighted mean of one chunk over the contributors of a commit.

``sum_i w_i x_i / sum_i w_i`` in commit order, added in fp32 (fp64 for fp64) and rounded once to the
tensor's dtype; ``w`` is scaled so that the largest is 1, which makes equal weights a plain mean.
It depends on the commit alone: whoever computes it gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from diloco_cloud.errors import CorruptContributionError
from diloco_cloud.exchange.codecs import get_codec
from diloco_cloud.exchange.codecs.base import ChunkMean, Codec, overlap
from diloco_cloud.exchange.codecs.chunks import Chunks
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.contribution import RAW
from diloco_cloud.exchange.layout import TensorLayout, all_finite, byte_view
from diloco_cloud.exchange.processors import ProcessorMeter


class ChunkMeans:
    """Computes the mean chunks of one commit.

    Args:
        commit: names weights, codecs and the size of chunks.
        layout: of the tensors.
        processor: measures how long it takes.

    Attributes:
        processor: likewise.

    Raises:
        ConfigError: a codec is not known here.
    """

    def __init__(
        self, commit: Commit, layout: TensorLayout, processor: ProcessorMeter | None = None
    ) -> None:
        self.processor = ProcessorMeter() if processor is None else processor
        self._weights = commit.weights
        self._layout = layout
        self._chunks = Chunks(layout, commit.chunk_bytes)
        self._codec = _codec(commit.codec)
        self._sums = _codec(commit.sums)
        #: By the elements that they have; new memory is met by page faults.
        self._spare: dict[int, list[ChunkMean]] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    def mean(self, chunk: int, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """The mean's bytes in the tensors' dtypes.

        Args:
            chunk: its number.
            parts: each contributor's bytes of it (uint8), in commit order.

        Raises:
            CorruptContributionError: a part cannot be decoded.
        """
        if self._codec is None:
            return self._mean_of_raw(chunk, parts)
        mean = self._mean_of_encoded(self._codec, chunk, parts)
        with self.processor.decoding():
            return self._as_bytes(chunk, mean.result())

    def write(
        self,
        chunk: int,
        parts: Iterable[torch.Tensor],
        put: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Have ``put`` write the mean into memory of the tensors; otherwise as :meth:`mean`."""
        if self._codec is None:
            means = self._mean_of_raw(chunk, parts)
            with self.processor.decoding():
                put(chunk, means)
            return
        mean = self._mean_of_encoded(self._codec, chunk, parts)
        with self.processor.decoding():
            put(chunk, self._as_bytes(chunk, mean.result()))
            self._use_again(chunk, mean)

    def sum_body(self, chunk: int, parts: Iterable[torch.Tensor]) -> memoryview:
        """The mean as it is stored for all others; arguments and errors as of :meth:`mean`."""
        if self._sums is None:
            return byte_view(self.mean(chunk, parts))
        if self._codec is None:
            values = self._chunks.values(chunk, self._mean_of_raw(chunk, parts))
            with self.processor.decoding():
                return self._sums.encode(values)
        mean = self._mean_of_encoded(self._codec, chunk, parts)
        with self.processor.decoding():
            values = mean.result()
            body = self._sums.encode(values)
            if not overlap(body, values):
                self._use_again(chunk, mean)
            return body

    def from_sum(self, chunk: int, body: torch.Tensor) -> torch.Tensor:
        """The mean's bytes in the tensors' dtypes, from what :meth:`sum_body` made (uint8).

        Raises:
            CorruptContributionError: it is no such body.
        """
        if self._sums is None:
            if len(body) != self.nbytes(chunk):
                raise CorruptContributionError(f"a sum of {len(body)} bytes")
            with self.processor.decoding(len(body)):
                return body  # It is work where it is written to its place.
        with self.processor.decoding(self.nbytes(chunk)):
            mean = self._sums.decode(body.numpy(), self._chunks.numel(chunk))
            return self._as_bytes(chunk, mean)

    def all_finite(self, chunk: int, part: torch.Tensor) -> bool:
        """Whether a contributor's chunk has neither NaN nor infinite values.

        Raises:
            CorruptContributionError: it cannot be decoded.
        """
        with self.processor.decoding():
            if self._codec is None:
                return all_finite(self._chunks.values(chunk, part))
            return self._codec.all_finite(part.numpy(), self._chunks.numel(chunk))

    def nbytes(self, chunk: int) -> int:
        """Bytes of a chunk in the tensors' dtypes."""
        start, stop = self._chunks.span(chunk)
        return stop - start

    def _mean_of_raw(self, chunk: int, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        start, size = self._chunks.span(chunk)[0], self.nbytes(chunk)
        segments = list(self._layout.within(start, size))
        sums = [
            torch.zeros((high - low) // segment.dtype.itemsize, dtype=segment.accumulator)
            for segment, low, high in segments
        ]
        for part, weight in zip(parts, self._weights, strict=True):
            with self.processor.decoding(size):
                for (segment, low, high), total in zip(segments, sums, strict=True):
                    values = part[low:high].view(segment.dtype).to(segment.accumulator)
                    # A product and a sum, each rounded: add_(alpha=) is one fused step on some CPUs
                    # and two on others, and the bits would depend on who reduces.
                    total.add_(values if weight == 1 else values * weight)
        weight = sum(self._weights)
        with self.processor.decoding():
            means = [
                total.div_(weight).to(segment.dtype).view(torch.uint8)
                for (segment, _, _), total in zip(segments, sums, strict=True)
            ]
        return means[0] if len(means) == 1 else torch.cat(means)

    def _mean_of_encoded(
        self, codec: Codec, chunk: int, parts: Iterable[torch.Tensor]
    ) -> ChunkMean:
        """Everything added; the mean is only to be asked for."""
        nbytes, numel = self.nbytes(chunk), self._chunks.numel(chunk)
        try:
            mean = self._spare[numel].pop()
        except (KeyError, IndexError):
            mean = codec.mean(numel)
        for part, weight in zip(parts, self._weights, strict=True):
            with self.processor.decoding(nbytes):  # Not while a part is waited for.
                mean.add(part.numpy(), weight)
        return mean

    def _use_again(self, chunk: int, mean: ChunkMean) -> None:
        """Have another chunk's mean use the memory, which nobody looks at any more."""
        if mean.clear():
            self._spare.setdefault(self._chunks.numel(chunk), []).append(mean)

    def _as_bytes(self, chunk: int, values: torch.Tensor) -> torch.Tensor:
        start, size = self._chunks.span(chunk)[0], self.nbytes(chunk)
        found: list[torch.Tensor] = []
        done = 0
        for segment, low, high in self._layout.within(start, size):
            count = (high - low) // segment.dtype.itemsize
            found.append(values[done : done + count].to(segment.dtype).view(torch.uint8))
            done += count
        return found[0] if len(found) == 1 else torch.cat(found)


def _codec(name: str) -> Codec | None:
    return None if name == RAW else get_codec(name)
