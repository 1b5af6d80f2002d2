"""What the C library keeps of memory that was freed."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

#: glibc's name for the greatest number of heaps (malloc.h).
_M_ARENA_MAX: Final = -8
_HEAPS: Final = 2
#: Of what is exchanged; and bytes that are little whatever that is.
_SHARE: Final = 8
_LITTLE: Final = 16 * 2**20
_STATM: Final = Path("/proc/self/statm")


def share_heaps() -> None:
    """Let the threads of this process share two of glibc's heaps; elsewhere, do nothing.

    By default each thread has one, up to eight per core, and keeps what was freed in it. Of a round
    of 256 MiB that leaves 46 % of them in memory, with two heaps 26 % (``benchmarks/exchange.py``);
    training takes as long.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _HEAPS)


def resident() -> int:
    """Bytes of this process in memory; 0 where the system does not tell."""
    with suppress(OSError):
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def give_back() -> None:
    """Return to the system what glibc's heaps have free; elsewhere, do nothing."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


@dataclass
class FreedMemory:
    """Returns freed memory to the system whenever much has piled up during an exchange.

    Chunks of several sizes come and go in many threads, and leave holes: after 2 GiB of traffic
    in chunks of 8 MiB, 192 MiB were free and still in memory, where 32 were in use. Returning them
    each time would have every chunk met by page faults.

    Attributes:
        nbytes: of the tensors that are exchanged.
        resident: bytes of this process in memory.
        give_back: returns what is free.
    """

    nbytes: int
    resident: Callable[[], int] = resident
    give_back: Callable[[], object] = give_back
    _least: int = field(init=False)

    def __post_init__(self) -> None:
        self._least = self.resident()

    def check(self) -> None:
        """Return what is free, if the process has grown by much since it was returned."""
        now = self.resident()
        if now - self._least > max(self.nbytes // _SHARE, _LITTLE):
            self.give_back()
            self._least = self.resident()
        else:
            self._least = min(self._least, now)


@cache
def _of_glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
