"""A replica's log: JSON lines on stdout, and the same lines in the run's prefix.

Whatever the trainer prints becomes log lines too, so every provider's log stream of a replica is
one JSON object per line, and ``diloco-cloud logs`` needs nothing but the store.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import time
import traceback
from typing import Any, TextIO

from diloco_cloud.errors import DilocoError
from diloco_cloud.run import keys
from diloco_cloud.store.base import ObjectStore

#: A chunk is sent when this much is waiting, whatever the time.
CHUNK_CHARACTERS = 256 * 1024


class JsonLines(logging.Formatter):
    """One JSON object per record: ts (s since the epoch), level, rank, attempt, logger, message."""

    def __init__(self, rank: int, attempt: int) -> None:
        super().__init__()
        self._identity = {"rank": rank, "attempt": attempt}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": round(record.created, 3),
            "level": record.levelname,
            **self._identity,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line)


class LogShipper(logging.Handler):
    """Collects formatted lines; :meth:`ship` writes them to the prefix as a new object."""

    def __init__(self, store: ObjectStore, rank: int, attempt: int) -> None:
        super().__init__()
        self._store = store
        self._place = (rank, attempt)
        self._lines: list[str] = []
        self._size = 0
        self._sequence = 0
        self.full = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        self._lines.append(line)
        self._size += len(line)
        if self._size >= CHUNK_CHARACTERS:
            self.full.set()

    def ship(self) -> None:
        """Store what has been collected. On failure it is kept for the next time."""
        self.acquire()
        try:
            lines, size = self._lines, self._size
            self._lines, self._size = [], 0
        finally:
            self.release()
        self.full.clear()
        if not lines:
            return
        try:
            data = ("\n".join(lines) + "\n").encode()
            self._store.put(keys.log_chunk(*self._place, self._sequence), data)
            self._sequence += 1
        except DilocoError:
            self._lines, self._size = lines + self._lines, size + self._size


class PrintLogger(io.TextIOBase):
    """A stand-in for ``sys.stdout`` or ``sys.stderr`` that logs whole lines."""

    def __init__(self, logger: logging.Logger, level: int, original: TextIO) -> None:
        self._logger, self._level, self._original = logger, level, original
        self._line = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        return self._original.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        # A progress bar redraws its line after a carriage return; only its last state is logged.
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line.strip():
                self._logger.log(self._level, "%s", line.rpartition("\r")[2])
        return len(text)

    def flush(self) -> None:
        self._original.flush()


class ReplicaLogging:
    """Installs the log for the life of a replica; a context manager.

    Attributes:
        shipper: the handler that collects lines for the store.
    """

    def __init__(self, store: ObjectStore, rank: int, attempt: int) -> None:
        self.shipper = LogShipper(store, rank, attempt)
        self._stream = logging.StreamHandler(sys.stdout)
        for handler in (self.shipper, self._stream):
            handler.setFormatter(JsonLines(rank, attempt))
        self._saved: tuple[TextIO, TextIO, int] | None = None

    def __enter__(self) -> ReplicaLogging:
        root = logging.getLogger()
        self._saved = (sys.stdout, sys.stderr, root.level)
        root.setLevel(logging.INFO)
        root.addHandler(self.shipper)
        root.addHandler(self._stream)
        logging.captureWarnings(True)
        # torchft logs two lines a sync at INFO that say nothing to a user.
        logging.getLogger("torchft").setLevel(logging.WARNING)
        out, err = sys.stdout, sys.stderr
        sys.stdout = PrintLogger(logging.getLogger("stdout"), logging.INFO, out)
        sys.stderr = PrintLogger(logging.getLogger("stderr"), logging.WARNING, err)
        return self

    def __exit__(self, *_exc: object) -> None:
        assert self._saved is not None
        sys.stdout, sys.stderr, level = self._saved
        root = logging.getLogger()
        root.setLevel(level)
        root.removeHandler(self.shipper)
        root.removeHandler(self._stream)
        logging.captureWarnings(False)
        self.shipper.ship()


def timestamp() -> float:
    """Seconds since the epoch by the local clock; for people to read, never for deadlines."""
    return round(time.time(), 3)
