"""Which contributions of an all-gather are sent chunk by chunk, and how those are read.

Sent so, they are read and averaged while the rest is on its way, up and down at the same time. What
is little is read as a whole before the decision, which then leaves out what is damaged.
"""

from __future__ import annotations

from typing import Final

#: Bytes of contributions that are read, checked and kept before the decision that names them.
KEEP_BYTES: Final = 16 * 2**20
#: Bytes that are read ahead of what is averaged: at 30 ms, enough for 2 Gbit/s.
AHEAD_BYTES: Final = 8 * 2**20
#: Tensors of fewer bytes are too few chunks for anything to overlap.
_STREAMED_FROM_BYTES: Final = 8 * 2**20
#: Encoded bytes that are worth an object of their own, and a read by everybody.
_LEAST_PART: Final = 256 * 2**10
#: One chunk more than is averaged keeps the link busy.
_LEAST_COLUMNS: Final = 2
#: Listings in which a large contribution is to appear.
_LOOKS: Final = 64


def is_streamed(nbytes: int, sent: float, chunks: int, contributors: int) -> bool:
    """Whether the contributions of an all-gather are sent chunk by chunk.

    Args:
        nbytes: of the tensors.
        sent: bytes of a contribution as it is stored.
        chunks: of a contribution.
        contributors: how many there are.
    """
    is_much = nbytes >= _STREAMED_FROM_BYTES and (contributors - 1) * sent > KEEP_BYTES
    return is_much and chunks > 1 and sent >= chunks * _LEAST_PART


def columns(parallel: int, nbytes: float) -> int:
    """Chunks that are read at once, each from all others.

    Args:
        parallel: requests under way at once.
        nbytes: that the others have stored of one chunk, together.
    """
    return max(_LEAST_COLUMNS, min(parallel, int(AHEAD_BYTES // max(1.0, nbytes))))


def columns_a_look(at_once: int, chunks: int) -> int:
    """New chunks that a listing is to show: fewer are not worth it, more come too late.

    Args:
        at_once: chunks that are read at once.
        chunks: in all, which the last listings name every one.
    """
    return max(1, at_once // 2, chunks // _LOOKS)
