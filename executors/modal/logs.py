"""What replicas print, as Modal keeps it."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from typing import Any, Final

#: Lines of a container's output that begin a life: by them a call's rank is found again.
ANNOUNCEMENT: Final = "diloco-replica"
_ANNOUNCED = re.compile(rf"{ANNOUNCEMENT} rank=(\d+) attempt=(\d+)")
#: Entries asked for at once. An entry is what was written at once: a line, a part or many.
_MOST_ENTRIES: Final = 20_000
#: Seconds that Modal's logs are behind what is written; a reader that follows looks back so far.
_OVERLAP_S: Final = 15.0


def announcement(rank: int, attempt: str) -> str:
    """The line that a container prints before anything else."""
    return f"{ANNOUNCEMENT} rank={rank} attempt={attempt}"


def tail(call: Any, n_lines: int) -> str:
    """The last ``n_lines`` lines of a call's stdout and stderr."""
    if n_lines < 1:
        return ""
    entries = call.logs.tail(min(n_lines + 1, _MOST_ENTRIES))
    text = "".join(entry.message for entry in entries if entry.source != "system")
    lines = text.splitlines(keepends=True)
    return "".join([line for line in lines if not _ANNOUNCED.match(line)][-n_lines:])


class LogFollower:
    """Reads a call's log in pieces, each line once.

    Modal has no cursor: a look begins a little before where the last one ended, and entries that
    were seen are left out by their time and text.

    Args:
        call: of the SDK.
        since: seconds since the epoch; None: from the beginning of the call.
    """

    def __init__(self, call: Any, since: float | None = None) -> None:
        self._call = call
        self._since = since
        self._seen: dict[tuple[float, str], None] = {}

    def read_new(self) -> Iterator[str]:
        """What has been written since the last call, as it was written."""
        since = None if self._since is None else _utc(self._since)
        for entry in self._call.logs.fetch(since=since):
            at = entry.timestamp.timestamp()
            key = (at, entry.message)
            if entry.source == "system" or key in self._seen:
                continue
            self._seen[key] = None
            self._since = max(self._since or 0.0, at - _OVERLAP_S)
            yield entry.message
        horizon = (self._since or 0.0) - 1.0
        self._seen = {key: None for key in self._seen if key[0] >= horizon}


def announced_calls(app: Any, since: float) -> dict[str, tuple[int, int]]:
    """Rank and attempt by call id, of the calls that an App has started.

    Args:
        app: of the SDK.
        since: seconds since the epoch.
    """
    found: dict[str, tuple[int, int]] = {}
    for entry in app.logs.fetch(since=_utc(since), search_text=ANNOUNCEMENT):
        match = _ANNOUNCED.search(entry.message)
        calls = [name for name in entry.context_ids if name.startswith("fc-")]
        if match is not None and calls:
            found[calls[0]] = (int(match[1]), int(match[2]))
    return found


def _utc(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)
