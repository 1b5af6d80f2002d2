"""Eight bits per value: 255 equal steps over each block's range."""

from __future__ import annotations

import numpy as np
import torch

from diloco_cloud.exchange.codecs import blocks
from diloco_cloud.exchange.codecs.base import Codec, Data, as_bytes, as_floats, memory

_TOP = 127.0


class Int8(Codec):
    """Scales as in :mod:`.blocks`, then one signed byte per value.

    The byte is the value over its block's scale, rounded to nearest, ties to even.
    """

    name = "int8"
    bits_per_parameter = 8 + 16 / blocks.BLOCK
    sums = "int8"

    def encode(self, values: torch.Tensor) -> memoryview:
        floats = as_floats(values)
        out = np.empty(self.longest(len(floats)), np.uint8)
        steps = out[blocks.scale_bytes(len(floats)) :].view(np.int8)
        scales = blocks.scale_words(out, len(floats))
        for part, of_blocks in blocks.parts(len(floats)):
            quotients, scales[of_blocks] = blocks.normalise(floats[part], _TOP)
            np.rint(quotients, out=quotients)
            into = steps[part]
            np.copyto(into, quotients.ravel()[: len(into)], casting="unsafe")
        return memory(out)

    def decode(self, data: Data, numel: int) -> torch.Tensor:
        array = as_bytes(data, self.longest(numel), "an int8 chunk")
        start = blocks.scale_bytes(numel)
        levels = torch.from_numpy(array[start:].view(np.int8).astype(np.float32))
        blocks.multiply(levels, blocks.scales_of(array[:start]))
        return levels

    def all_finite(self, data: Data, numel: int) -> bool:
        array = as_bytes(data, self.longest(numel), "an int8 chunk")
        scales = blocks.scales_of(array[: blocks.scale_bytes(numel)])
        return blocks.are_bounded(scales, _TOP + 1) or super().all_finite(data, numel)

    def longest(self, numel: int) -> int:
        return blocks.scale_bytes(numel) + numel
