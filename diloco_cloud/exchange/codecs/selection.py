"""Which values of a chunk are worth sending: the largest magnitudes of every block."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from diloco_cloud.exchange.codecs.base import SMALLEST, Floats
from diloco_cloud.exchange.codecs.golomb import Numbers

#: Values among which the largest are chosen; the last block of a chunk may be shorter.
BLOCK = 4096

#: Values that are looked at together. Temporaries of whole chunks are so large that an allocator
#: returns them to the system each time, and the page faults take longer than the selection.
_AT_ONCE = 16 * BLOCK

_SMALLEST = np.float32(SMALLEST).view(np.int32)
_MAGNITUDE = np.int32(0x7FFF_FFFF)

#: Bits of an fp32 without its sign. Their order is that of the magnitudes, with NaN above infinity.
_Magnitudes: TypeAlias = npt.NDArray[np.int32]


def block_count(numel: int) -> int:
    """Blocks of a chunk."""
    return -(-numel // BLOCK)


def select(values: Floats, keep: int) -> Numbers:
    """Positions of the ``keep`` largest magnitudes of every block, rising.

    Of equal ones, the first are taken. A shorter block keeps the same share, rounded up. What is
    written as zero is not taken, so a block may keep fewer.
    """
    bits = values.view(np.int32)
    whole = len(values) // BLOCK * BLOCK
    found = []
    for start in range(0, whole, _AT_ONCE):
        blocks = bits[start : min(start + _AT_ONCE, whole)].reshape(-1, BLOCK)
        found.append(_largest(blocks, keep) + start)
    tail = bits[whole:]
    found.append(_largest(tail.reshape(-1, len(tail) or 1), -(-keep * len(tail) // BLOCK)) + whole)
    return np.concatenate(found)


def _largest(bits: npt.NDArray[np.int32], keep: int) -> Numbers:
    """Positions of the ``keep`` largest magnitudes of every row, in the flattened ``bits``."""
    width = bits.shape[1]
    if bits.size == 0:
        return np.empty(0, np.int64)
    blocks: _Magnitudes = bits & _MAGNITUDE
    thresholds = np.partition(blocks, width - keep, axis=1)[:, width - keep]
    np.maximum(thresholds, _SMALLEST, out=thresholds)
    found = np.flatnonzero(blocks >= thresholds[:, None])
    counts = np.bincount(found // width, minlength=len(blocks))
    if (counts <= keep).all():
        return found
    # Some rows have more values at their threshold than they may keep: they drop the last of them.
    ties = blocks.ravel()[found] == thresholds[found // width]
    ties_until = np.concatenate([[0], np.cumsum(ties)])
    first = np.cumsum(counts) - counts
    ties_in = ties_until[first + counts] - ties_until[first]
    room = keep - (counts - ties_in)
    rank = ties_until[1:] - ties_until[first].repeat(counts)
    kept: Numbers = found[~ties | (rank <= room.repeat(counts))]
    return kept
