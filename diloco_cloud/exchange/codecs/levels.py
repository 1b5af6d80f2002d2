"""Two magnitudes for the values that a chunk keeps, and a scale for each of its blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diloco_cloud.exchange.codecs.base import Bytes, Floats
from diloco_cloud.exchange.codecs.golomb import Numbers

#: 2**(-i / 8) as fp32: part of the format, hence in full.
ROOTS: Floats = np.array(
    [
        0x3F80_0000,
        0x3F6A_C0C7,
        0x3F57_44FD,
        0x3F45_672A,
        0x3F35_04F3,
        0x3F25_FED7,
        0x3F18_37F0,
        0x3F0B_95C2,
    ],
    np.uint32,
).view(np.float32)
#: Scales that a byte can say, from 1 down over 32 octaves: a root and a power of two of each.
_ROOT_OF: Floats = np.tile(ROOTS, 32)
_EXPONENT_OF = -np.arange(32, dtype=np.int32).repeat(8)
_SCALES: Floats = np.ldexp(_ROOT_OF, _EXPONENT_OF)
#: Halfway between each scale and the next, rising.
_BETWEEN = ((_SCALES[:-1].astype(np.float64) + _SCALES[1:]) / 2)[::-1]
_MOST = float(np.finfo(np.float32).max)

_Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Levels:
    """What kept values are rounded to.

    Attributes:
        low, high: the two magnitudes at scale 1; NaN where the chunk held NaN or infinity.
        scales: of each block, in eighths of an octave below 1.
    """

    low: float
    high: float
    scales: Bytes

    @property
    def usable(self) -> bool:
        """Whether they are numbers."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def table(self) -> Floats:
        """What is decoded in each block: low, high, -low and -high, shape (blocks, 4)."""
        levels = np.array([self.low, self.high, -self.low, -self.high], np.float32)
        with np.errstate(all="ignore"):  # Anybody may have written the levels.
            rooted = _ROOT_OF.take(self.scales)[:, None] * levels
            table: Floats = np.ldexp(rooted, _EXPONENT_OF.take(self.scales)[:, None])
        return table


def fit(magnitudes: Floats, block_of: Numbers, blocks: int) -> tuple[Levels, npt.NDArray[np.bool_]]:
    """Choose the levels for some values.

    A block's scale follows the mean of its values; the two magnitudes are those with the least
    squared error over all of them, each taken in units of its block's scale.

    Args:
        magnitudes: of the kept values, shape (kept,).
        block_of: index of each one's block, rising.
        blocks: number of blocks.

    Returns:
        The levels, and which of the values take the high one.
    """
    nothing = Levels(0.0, 0.0, np.zeros(blocks, np.uint8))
    if len(magnitudes) == 0:
        return nothing, np.zeros(0, np.bool_)
    if not np.isfinite(magnitudes).all():
        poisoned = Levels(float("nan"), float("nan"), nothing.scales)
        return poisoned, np.zeros(len(magnitudes), np.bool_)
    exact = magnitudes.astype(np.float64)
    # Summed one after the other, unlike sum(), whose order depends on the processor.
    sums = np.bincount(block_of, weights=exact, minlength=blocks)
    counts = np.bincount(block_of, minlength=blocks)
    means = sums / np.maximum(counts, 1)
    scales = 255 - np.searchsorted(_BETWEEN * means.max(), means, side="right")
    scales[counts == 0] = 0
    units = exact / _SCALES[scales[block_of]]
    low, high = _two_means(np.sort(units))
    levels = Levels(min(low, _MOST), min(high, _MOST), scales.astype(np.uint8))
    return levels, units >= (low + high) / 2


def _two_means(rising: _Doubles) -> tuple[float, float]:
    """Means of the lower and the upper part, cut where the squared error is least."""
    count = len(rising)
    sums = np.cumsum(rising)
    if count == 1:
        return float(sums[0]), float(sums[0])
    below = np.arange(1, count)
    left, right = sums[:-1], sums[-1] - sums[:-1]
    cut = int(np.argmax(left * (left / below) + right * (right / (count - below))))
    return float(left[cut] / below[cut]), float(right[cut] / (count - below[cut]))
