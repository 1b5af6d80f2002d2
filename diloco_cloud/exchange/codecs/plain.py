"""Codecs that write every value on its own: fp32 and bf16."""

from __future__ import annotations

import numpy as np
import torch

from diloco_cloud.exchange.codecs.base import Codec, Data, Words, as_bytes, as_floats, memory

_NAN = np.uint16(0x7FC0)


class Float32(Codec):
    """The values' own bytes, little endian."""

    name = "fp32"
    exact = True
    bits_per_parameter = 32.0

    def encode(self, values: torch.Tensor) -> memoryview:
        return memory(as_floats(values).astype("<f4", copy=False).view(np.uint8))

    def decode(self, data: Data, numel: int) -> torch.Tensor:
        array = as_bytes(data, self.longest(numel), "an fp32 chunk")
        return torch.from_numpy(array.view("<f4").astype(np.float32))

    def longest(self, numel: int) -> int:
        return 4 * numel


class BFloat16(Codec):
    """The upper half of fp32, rounded to nearest, ties to even, little endian.

    Every NaN becomes 0x7FC0. Values beyond the largest bf16 become infinite, as they do in torch.
    """

    name = "bf16"
    bits_per_parameter = 16.0
    sums = "bf16"

    def encode(self, values: torch.Tensor) -> memoryview:
        floats = as_floats(values)
        bits: Words = floats.view(np.uint32)
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += bits
        rounded >>= np.uint32(16)
        halves = rounded.astype("<u2")
        nans = np.isnan(floats)
        if nans.any():  # The sum above may have carried a NaN over into another number.
            halves[nans] = _NAN
        return memory(halves.view(np.uint8))

    def decode(self, data: Data, numel: int) -> torch.Tensor:
        array = as_bytes(data, self.longest(numel), "a bf16 chunk")
        bits = array.view("<u2").astype(np.uint32)
        bits <<= np.uint32(16)
        return torch.from_numpy(bits.view(np.float32))

    def longest(self, numel: int) -> int:
        return 2 * numel
