"""Tracebacks as a user wants them: their own lines, not those of what called them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_HEADER: Final = "Traceback (most recent call last):"
_FRAME: Final = re.compile(r'  File "(?P<path>[^"]+)", line \d+')
#: What stands between the interpreter and a trainer, the same in every traceback.
_PLUMBING: Final = re.compile(
    r"executors/local/child\.py$"
    r"|diloco_cloud/replica_entrypoint\.py$"
    r"|diloco_cloud/replica/\w+\.py$"
    r"|/importlib/__init__\.py$"
    r"|^<frozen "
)
#: Lines of a long traceback that are shown from its beginning: the header and some three frames.
_FIRST_LINES: Final = 8


def without_plumbing(lines: Sequence[str]) -> list[str]:
    """``lines`` of a log without the frames that lead from the program to the trainer."""
    kept: list[str] = []
    dropping = False
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None:
            dropping = _PLUMBING.search(frame["path"]) is not None
        elif not line.startswith("    "):  # the source of a frame is indented deeper than its name
            dropping = False
        if dropping:
            continue
        if kept and kept[-1] == _HEADER and not line.startswith("  "):
            kept.pop()  # none of its frames is left
        kept.append(line)
    return kept


def end_of_log(lines: Sequence[str], n_lines: int) -> list[str]:
    """The last ``n_lines`` of a log; of a longer traceback both ends, where the causes are."""
    starts = [index for index, line in enumerate(lines) if line == _HEADER]
    if not starts or len(lines) - starts[-1] <= n_lines:
        return list(lines[-n_lines:])
    first = list(lines[starts[-1] : starts[-1] + _FIRST_LINES])
    return [*first, "  …", *lines[len(lines) - (n_lines - len(first) - 1) :]]
