"""How many heaps a replica's threads have."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

#: glibc's name for the greatest number of heaps (malloc.h).
_M_ARENA_MAX: Final = -8
_HEAPS: Final = 2


def share_heaps() -> None:
    """Let the threads of this process share two of glibc's heaps; elsewhere, do nothing.

    By default each thread has one, up to eight per core, and keeps what was freed in it. Of a round
    of 256 MiB that leaves 46 % of them in memory, with two heaps 26 % (``benchmarks/exchange.py``);
    training takes as long.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _HEAPS)
