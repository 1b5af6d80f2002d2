"""A replica's log: JSON lines on stdout, and the same lines in the run's prefix.

Whatever the trainer prints becomes log lines too, so every provider's log stream of a replica is
one JSON object per line, and ``diloco-cloud logs`` needs nothing but the store.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
from typing import TextIO

from diloco_cloud.replica.lines import JsonLines, LineStream
from diloco_cloud.replica.shipper import LogShipper
from diloco_cloud.store.base import ObjectStore

#: Seconds that the end of a replica waits for a shipment under way.
LAST_SHIPMENT_S = 5.0


class PrintLogger(io.TextIOBase):
    """A stand-in for ``sys.stdout`` or ``sys.stderr`` that logs whole lines."""

    def __init__(self, logger: logging.Logger, level: int, original: TextIO) -> None:
        self._logger, self._level, self._original = logger, level, original
        self._line = ""
        self._logging = threading.local()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        return self._original.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if getattr(self._logging, "now", False):
            # A handler of somebody else's reports here that it failed: logging that would call it
            # again.
            with contextlib.suppress(OSError, ValueError):
                self._original.write(text)
            return len(text)
        self._logging.now = True
        try:
            self._write(text)
        finally:
            self._logging.now = False
        return len(text)

    def _write(self, text: str) -> None:
        # A progress bar redraws its line after a carriage return; only its last state is logged.
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line.strip():
                self._logger.log(self._level, "%s", line.rpartition("\r")[2])


class ReplicaLogging:
    """Installs the log for the life of a replica; a context manager.

    Attributes:
        shipper: the handler that collects lines for the store.
    """

    def __init__(self, store: ObjectStore, rank: int, attempt: int) -> None:
        self.shipper = LogShipper(store, rank, attempt)
        self._stream = LineStream(sys.stdout)
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
        self._stream.settle()
        self.shipper.ship(wait_s=LAST_SHIPMENT_S)
