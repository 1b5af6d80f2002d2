"""Reading a log that is being written, from its end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_BLOCK: Final = 1 << 16
#: A tail reads no further back than this, however long the lines are.
_LIMIT: Final = 1 << 24


def tail(path: Path, n_lines: int) -> str:
    """The last ``n_lines`` lines of a file; "" where there is none."""
    if n_lines < 1:
        return ""
    try:
        with path.open("rb") as file:
            position = file.seek(0, os.SEEK_END)
            end, blocks, newlines = position, [], 0
            # One newline more than lines: the last line ends with one, and the first line wanted
            # is whole only if the newline before it has been seen.
            while position > 0 and newlines <= n_lines and end - position < _LIMIT:
                size = min(_BLOCK, position)
                position = file.seek(position - size)
                blocks.append(file.read(size))
                newlines += blocks[-1].count(b"\n")
    except FileNotFoundError:
        return ""
    lines = b"".join(reversed(blocks)).splitlines(keepends=True)
    return b"".join(lines[-n_lines:]).decode(errors="replace")


def read_from(path: Path, offset: int, limit: int = 1 << 20) -> tuple[bytes, int]:
    """At most ``limit`` bytes from ``offset``, and the offset to read from next."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(limit)
    except FileNotFoundError:
        return b"", offset
    return data, offset + len(data)
