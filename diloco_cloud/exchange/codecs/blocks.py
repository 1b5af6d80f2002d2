"""Values in blocks that share a scale: what the int8 and the 4-bit codecs have in common.

A chunk of n values is ceil(n / 128) scales, bf16, little endian, and then the codes. A value is
``code's level x scale of its block``; a scale that is NaN makes its block NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from diloco_cloud.exchange.codecs.base import SMALLEST, Bytes, Floats, Words

#: Values that share a scale; the last block of a chunk may be shorter.
BLOCK = 128
#: Values that are looked at together. Temporaries of whole chunks are so large that they leave
#: holes between what is kept of each, or are met by page faults each time.
AT_ONCE = 1024 * BLOCK
_INFINITE = np.uint32(0x7F80_0000)
_NAN = np.uint32(0x7FC0_0000)
_SMALLEST = np.float32(SMALLEST).view(np.uint32)
#: Larger values are written as if they were this one, so that no scale or product overflows.
LARGEST = 2.0**127
_LARGEST = np.float32(LARGEST).view(np.uint32)


def scale_bytes(numel: int) -> int:
    """Bytes of the scales of ``numel`` values."""
    return 2 * -(-numel // BLOCK)


def parts(numel: int) -> Iterator[tuple[slice, slice]]:
    """Values that are looked at together, and their blocks."""
    for start in range(0, numel, AT_ONCE):
        stop = min(start + AT_ONCE, numel)
        yield slice(start, stop), slice(start // BLOCK, -(-stop // BLOCK))


def scale_words(chunk: Bytes, numel: int) -> npt.NDArray[np.uint16]:
    """Where the scales of a chunk of ``numel`` values are written, one for each block."""
    return chunk[: scale_bytes(numel)].view("<u2")


def normalise(
    values: Floats, top: float, gain: float = 1.0
) -> tuple[Floats, npt.NDArray[np.uint16]]:
    """Divide every block by its scale, which takes its largest magnitude to ``top`` or just below.

    Args:
        values: shape (n,).
        top: the largest magnitude a code stands for, at most 2**20.
        gain: by how much the scales that are written are larger than those divided by, to make up
            for what rounding to levels shrinks; from 1 to 1.5.

    Returns:
        Quotients within ±``top`` (up to rounding), shape (blocks, BLOCK), the last block filled up
        with zeros; and the scales, shape (blocks,), as :func:`scale_words` holds them.
    """
    blocks = _in_blocks(values)
    # NaN where a block has any.
    tops: Floats = torch.from_numpy(blocks).abs().amax(1).numpy()
    largest: Words = tops.view(np.uint32)
    scales = np.minimum(largest, _LARGEST).view(np.float32) / np.float32(top)
    # Up to the next bf16, so that no quotient exceeds the top.
    words: Words = (scales.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF_0000)
    words[largest < _SMALLEST] = 0
    usable = (words > 0) & (largest < _INFINITE)
    divisors = np.where(usable, words, np.float32(1).view(np.uint32)).view(np.float32)
    with np.errstate(invalid="ignore"):  # Some NaNs are not quiet.
        quotients = np.divide(blocks, divisors[:, None])
    quotients[~usable] = 0
    huge = largest > _LARGEST
    quotients[huge] = quotients[huge].clip(-top, top)
    if gain != 1:
        larger: Words = (words.view(np.float32) * np.float32(gain)).view(np.uint32)
        words = (larger + np.uint32(0x8000)) & np.uint32(0xFFFF_0000)
    words[largest >= _INFINITE] = _NAN
    return quotients, (words >> np.uint32(16)).astype("<u2")


def scales_of(data: Bytes) -> Floats:
    """Scales from their bytes; any fp32 whatever, since anybody may have written them."""
    words = data.view("<u2").astype(np.uint32) << np.uint32(16)
    return words.view(np.float32)


def are_bounded(scales: Floats, top: float) -> bool:
    """Whether no level within ±``top`` makes NaN or infinity of any of ``scales``."""
    return bool((np.abs(scales) <= np.float32(LARGEST / top)).all())  # False for NaN.


def multiply(levels: torch.Tensor, scales: Floats) -> None:
    """Multiply every block of ``levels``, fp32, shape (n,), by its scale, in place."""
    whole = len(levels) // BLOCK
    of_blocks = torch.from_numpy(scales)
    levels[: whole * BLOCK].view(whole, BLOCK).mul_(of_blocks[:whole, None])
    levels[whole * BLOCK :].mul_(of_blocks[whole:])


def _in_blocks(values: Floats) -> Floats:
    short = -len(values) % BLOCK
    if short:
        values = np.concatenate([values, np.zeros(short, np.float32)])
    return values.reshape(-1, BLOCK)
