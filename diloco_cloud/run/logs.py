"""The logs of all replicas as one stream, read from the run's prefix.

Replicas write their JSON-lines log as numbered chunks, so any machine can read it, during the run
or years after. A reader that follows asks for each replica's next chunk by name, which costs the
same however long the run has been going.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from diloco_cloud import keys
from diloco_cloud.errors import NotFoundError
from diloco_cloud.store.base import ObjectInfo, ObjectStore

#: A life of a rank: (rank, attempt).
Life = tuple[int, int]

#: Fields of a record that its rendering leaves out or shows in another place.
_KNOWN = frozenset(
    {"ts", "level", "run", "rank", "attempt", "logger", "event", "message", "traceback", "exc"}
)


@dataclass(frozen=True)
class LogLine:
    """One line of one replica's log.

    Attributes:
        time: seconds since the epoch, by the replica's clock; None for raw output.
        text: without a line end.
    """

    rank: int
    attempt: int
    time: float | None
    text: str


class ChunkReader:
    """Reads the log chunks of a run, each once."""

    def __init__(self, store: ObjectStore, ranks: Iterable[int] | None = None) -> None:
        self._store = store
        self._ranks = None if ranks is None else frozenset(ranks)
        self._next: dict[Life, int] = {}

    @property
    def seen(self) -> frozenset[Life]:
        """Lives that have written at least one chunk."""
        return frozenset(life for life, sequence in self._next.items() if sequence > 0)

    def read_all(self, *, tail: int | None = None, since: float | None = None) -> list[LogLine]:
        """Everything there is, in time order.

        Args:
            tail: only the last so many lines, over all replicas.
            since: only lines from this time on, in seconds since the epoch.
        """
        lines: list[LogLine] = []
        for life in self._lives():
            chunks = self._store.list(_directory(life))
            if chunks:
                self._next[life] = _sequence(chunks[-1]) + 1
            lines += self._read_backwards(life, chunks, tail=tail, since=since)
        lines.sort(key=lambda line: line.time or 0.0)
        if since is not None:
            lines = [line for line in lines if line.time is None or line.time >= since]
        return lines if tail is None else lines[-tail:] if tail else []

    def read_new(self) -> list[LogLine]:
        """What has been written since the last call, in time order."""
        lines: list[LogLine] = []
        for life in self._lives():
            while True:
                sequence = self._next.get(life, 0)
                try:
                    raw = self._store.get(keys.log_chunk(*life, sequence))
                except NotFoundError:
                    break
                self._next[life] = sequence + 1
                lines += parse_chunk(raw, life)
        lines.sort(key=lambda line: line.time or 0.0)
        return lines

    def _lives(self) -> list[Life]:
        found = []
        for name in self._store.list_dirs(keys.LOGS):
            rank, _, attempt = name.partition(".")
            if rank.isdigit() and attempt.isdigit():
                found.append((int(rank), int(attempt)))
        return [life for life in found if self._ranks is None or life[0] in self._ranks]

    def _read_backwards(
        self, life: Life, chunks: list[ObjectInfo], *, tail: int | None, since: float | None
    ) -> list[LogLine]:
        """The lines of ``chunks``, without reading those that can't matter."""
        parts: list[list[LogLine]] = []
        count = 0
        for chunk in reversed(chunks):
            # A chunk holds nothing newer than its own writing; a minute allows for clock skew.
            too_old = since is not None and chunk.last_modified < since - 60
            if too_old or (tail is not None and count >= tail):
                break
            parts.append(parse_chunk(self._store.get(chunk.key), life))
            count += len(parts[-1])
        return [line for part in reversed(parts) for line in part]


def parse_chunk(raw: bytes, life: Life) -> list[LogLine]:
    """The lines in a piece of a JSON-lines log; anything that isn't JSON is kept as it is."""
    lines = []
    for text in raw.decode("utf-8", errors="replace").splitlines():
        record = parse_record(text)
        if record is None:
            lines.append(LogLine(*life, None, text))
            continue
        time = parse_time(record.get("ts"))
        lines += [LogLine(*life, time, part) for part in render_record(record)]
    return lines


def parse_record(text: str) -> dict[str, Any] | None:
    """A replica's log record, or None if ``text`` is something else."""
    if not text.startswith("{"):
        return None
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "ts" in record else None


def render_record(record: Mapping[str, Any]) -> list[str]:
    """A record as text: its message, then its fields, then a traceback's lines."""
    head = str(record.get("message") or record.get("event") or "")
    level = str(record.get("level", "")).upper()
    printed = record.get("logger") in ("stdout", "stderr")
    if level not in ("", "INFO", "DEBUG") and not printed:
        head = f"{level} {head}"
    fields = [
        f"{name}={_short(value)}"
        for name, value in record.items()
        if name not in _KNOWN and value is not None
    ]
    event = record.get("event")
    if event and record.get("message"):
        fields.insert(0, f"[{event}]")
    first = head.splitlines() or [""]
    first[0] = " ".join([first[0], *fields]) if len(first) == 1 else first[0]
    trace = str(record.get("traceback") or record.get("exc") or "")
    return [*first, *trace.rstrip().splitlines()]


def render_tail(text: str) -> list[str]:
    """The output of a replica's process as lines, its log records made readable."""
    lines: list[str] = []
    for line in text.rstrip().splitlines():
        record = parse_record(line)
        lines += [line] if record is None else render_record(record)
    return lines


def native_lines(text: str) -> list[str]:
    """The output of a replica's process without its log records, which the chunks hold."""
    return [line for line in text.rstrip().splitlines() if parse_record(line) is None]


def chunk_tail(store: ObjectStore, rank: int, attempt: int, n_lines: int) -> list[str]:
    """The last lines that one life of a rank has logged."""
    lines: list[str] = []
    for chunk in reversed(store.list(_directory((rank, attempt)))):
        lines = [line.text for line in parse_chunk(store.get(chunk.key), (rank, attempt))] + lines
        if len(lines) >= n_lines:
            break
    return lines[-n_lines:]


def parse_time(value: object) -> float | None:
    """Seconds since the epoch, from a number or an ISO 8601 text."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        try:
            return datetime.datetime.fromisoformat(value).timestamp()
        except ValueError:
            return None
    return None


def _directory(life: Life) -> str:
    return f"{keys.LOGS}{life[0]:04d}.{life[1]:04d}/"


def _sequence(chunk: ObjectInfo) -> int:
    return int(chunk.key.rpartition("/")[2].partition(".")[0])


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)
