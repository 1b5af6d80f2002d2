"""A few large values of each block, where they are and roughly how large: 0.15 bits per parameter.

SparseLoCo's compression (arXiv:2508.15706). Of every 4096 values the 64 of largest magnitude are
sent, each as its sign and one of two magnitudes; what is not sent stays in the sender's residual
(:mod:`.feedback`), and an element's mean is over those who sent it.

The wire is our own: positions take 7.5 bits instead of 12, and every block has a scale, since a
chunk holds parts of tensors of very different size. A value that its magnitude would overshoot by
more than itself is not sent, so that what remains is never more than there was.

A chunk, little endian:

    2 f32  low and high magnitude
    u8     for each block of 4096 values: its scale s
    set    positions of the values that are sent (see :mod:`.golomb`)
    bits   their signs, 1 for negative
    set    which of them have the high magnitude

A value is ``(magnitude x ROOTS[s % 8]) x 2**-(s // 8)``, rounded after each product.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import torch

from diloco_cloud.errors import ConfigError, CorruptContributionError
from diloco_cloud.exchange.codecs.base import (
    Bytes,
    ChunkMean,
    Codec,
    Data,
    as_floats,
    memory,
)
from diloco_cloud.exchange.codecs.golomb import Numbers, Reader, encode_places, expected_bits
from diloco_cloud.exchange.codecs.levels import Levels, fit
from diloco_cloud.exchange.codecs.selection import BLOCK, block_count, select

_PAIR = struct.Struct("<ff")
_BLOCK_BITS = BLOCK.bit_length() - 1
#: Below any weight that a contribution has, and no subnormal number.
_LEAST_WEIGHT = 2.0**-126


class Sparse(Codec):
    """The largest values of each block; see the module.

    Args:
        keep: values of each block of 4096 that are sent.
        decay: β of the error feedback.

    Raises:
        ConfigError: ``keep`` is not from 1 to 4096, or ``decay`` not above 0 and at most 1.
    """

    name = "sparse"
    sums = ""

    def __init__(self, keep: int = 64, decay: float = 0.95) -> None:
        if not 1 <= keep <= BLOCK:
            raise ConfigError(f"sparse cannot keep {keep} of {BLOCK} values", fix="Usual is 64.")
        if not 0 < decay <= 1:
            raise ConfigError(f"{decay} is no decay of a residual", fix="Usual is 0.95.")
        self.keep = keep
        self.decay = decay
        # A sign each, and a quarter of them high.
        per_value = expected_bits(BLOCK, keep) + 1 + expected_bits(4, 1) / 4
        self.bits_per_parameter = (keep * per_value + 8) / BLOCK

    def encode(self, values: torch.Tensor) -> memoryview:
        floats = as_floats(values)
        positions = select(floats, self.keep)
        block_of = positions >> _BLOCK_BITS
        kept = floats.take(positions)
        magnitudes = np.abs(kept)
        levels, high = fit(magnitudes, block_of, block_count(len(floats)))
        if levels.usable:
            sent = levels.table.ravel().take(4 * block_of + high)
            worth = magnitudes >= sent * np.float32(0.5)
            if not worth.all():
                positions, kept, high = positions[worth], kept[worth], high[worth]
        planes = [
            np.frombuffer(_PAIR.pack(levels.low, levels.high), np.uint8),
            levels.scales,
            encode_places(positions, len(floats)),
            np.packbits(np.signbit(kept)),
            encode_places(np.flatnonzero(high), len(high)),
        ]
        return memory(np.concatenate(planes))

    def decode(self, data: Data, numel: int) -> torch.Tensor:
        positions, values = self.decode_sent(data, numel)
        return torch.zeros(numel).index_copy_(0, positions, values)

    def all_finite(self, data: Data, numel: int) -> bool:
        levels, positions, _, highs = self._read(data, numel)
        any_high, any_low = len(highs) > 0, len(highs) < len(positions)
        return (math.isfinite(levels.low) or not any_low) and (
            math.isfinite(levels.high) or not any_high
        )

    def subtract(self, data: Data, values: torch.Tensor) -> None:
        positions, sent = self.decode_sent(data, len(values))
        values.index_add_(0, positions, sent, alpha=-1)

    def decode_sent(self, data: Data, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions (int64), rising, and values (fp32) of the elements that were sent.

        Raises:
            CorruptContributionError: not a chunk of ``numel`` values in this format.
        """
        levels, positions, codes, highs = self._read(data, numel)
        # A row of the table is a block, and a column a sign and a magnitude.
        codes <<= 1
        codes[highs] += 1
        places = (positions >> (_BLOCK_BITS - 2)) & ~3
        places += codes
        return torch.from_numpy(positions), torch.from_numpy(levels.table.ravel().take(places))

    def _read(self, data: Data, numel: int) -> tuple[Levels, Numbers, Bytes, Numbers]:
        """A chunk's levels and positions, their signs (1: negative), and which are high.

        Raises:
            CorruptContributionError: not a chunk of ``numel`` values in this format.
        """
        array = np.frombuffer(data, np.uint8)
        if len(array) > self.longest(numel):
            raise CorruptContributionError(f"{len(array)} bytes are no sparse chunk")
        reader = Reader(array)
        low, high = _PAIR.unpack(reader.bytes(_PAIR.size).tobytes())
        levels = Levels(low, high, reader.bytes(block_count(numel)))
        positions = reader.places(numel)
        negative = reader.flags(len(positions))
        highs = reader.places(len(positions))
        reader.end()
        return levels, positions, negative, highs

    def longest(self, numel: int) -> int:
        # Three bits per value where all are sent, and fewer otherwise.
        return block_count(numel) + numel // 2 + 64

    def mean(self, numel: int) -> ChunkMean:
        return SendersMean(self, numel)


class SendersMean(ChunkMean):
    """``sum_i w_i x_i / sum_i w_i`` of every element, over those that sent it."""

    def __init__(self, codec: Sparse, numel: int) -> None:
        self._codec = codec
        self._sums = torch.zeros(numel)
        self._weights = torch.zeros(numel)

    def add(self, data: Data, weight: float) -> None:
        positions, values = self._codec.decode_sent(data, len(self._sums))
        # No position occurs twice, so these are plain sums; products and sums rounded on their own.
        self._sums.index_add_(0, positions, values if weight == 1 else values.mul_(weight))
        self._weights.index_add_(0, positions, torch.full_like(values, weight))

    def result(self) -> torch.Tensor:
        # What nobody sent is 0, whatever it is divided by. To divide all is several times faster
        # than to find those that were sent.
        return self._sums.div_(self._weights.clamp_(min=_LEAST_WEIGHT))

    def clear(self) -> bool:
        self._sums.zero_()
        self._weights.zero_()
        return True
