"""A replica's log lines on their way to the run's prefix."""

from __future__ import annotations

import logging
import threading
from collections import deque

from diloco_cloud import keys
from diloco_cloud.replica.lines import LossyHandler
from diloco_cloud.store.base import ObjectStore

#: A chunk is sent when this much is waiting, whatever the time.
CHUNK_CHARACTERS = 256 * 1024
#: As much is kept while the store is away.
KEEP_CHARACTERS = 8 * 1024 * 1024


class LogShipper(LossyHandler):
    """Collects formatted lines; :meth:`ship` writes them to the prefix as a new object.

    Args:
        store: the run's prefix.
        rank, attempt: of this replica.
        keep: characters kept while the store is away, besides the chunk that it did not take;
            beyond it the oldest lines are dropped.

    Attributes:
        full: set when much has been collected since the last shipment.
    """

    def __init__(
        self, store: ObjectStore, rank: int, attempt: int, *, keep: int = KEEP_CHARACTERS
    ) -> None:
        super().__init__()
        self._store = store
        self._place = (rank, attempt)
        self._keep = keep
        self._lines: deque[str] = deque()
        self._size = 0
        self._fresh = 0
        self._dropped = 0
        self._sequence = 0
        self._chunk: bytes | None = None
        self._shipping = threading.Lock()
        self.full = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self._lines.append(line)
        self._size += len(line)
        self._fresh += len(line)
        self._trim()
        if self._fresh >= CHUNK_CHARACTERS:
            self.full.set()

    def ship(self, *, wait_s: float = 0.0) -> bool:
        """Store what has been collected. On failure it is kept for the next time.

        Args:
            wait_s: seconds to wait for a shipment that is under way in another thread; if it is
                still stuck then, nothing is done.

        Returns:
            Whether all that was collected before is stored.
        """
        if not self._shipping.acquire(timeout=wait_s):
            return False
        try:
            # First what an earlier attempt has left. It stays as it was: a request that failed may
            # have been carried out, and a chunk that somebody has read is not read again.
            return (self._chunk is None or self._put()) and (self._pack() is None or self._put())
        finally:
            self._shipping.release()

    def _put(self) -> bool:
        assert self._chunk is not None
        try:
            self._store.put(keys.log_chunk(*self._place, self._sequence), self._chunk)
        except Exception:  # not logged: every failure would add to what there is to ship
            return False
        self._sequence += 1
        self._chunk = None
        return True

    def _pack(self) -> bytes | None:
        """Make a chunk of everything collected; None if that is nothing."""
        self.acquire()
        try:
            lines, dropped = list(self._lines), self._dropped
            self._lines.clear()
            self._size = self._fresh = self._dropped = 0
            self.full.clear()
        finally:
            self.release()
        # What was dropped is older than what was kept.
        notice = [self._notice(dropped)] if dropped else []
        text = "".join(f"{line}\n" for line in [*notice, *lines])
        self._chunk = text.encode() or None
        return self._chunk

    def _trim(self) -> None:
        """Drop the oldest lines beyond what is kept; the lock is held."""
        while self._size > self._keep:
            self._size -= len(self._lines.popleft())
            self._dropped += 1

    def _notice(self, dropped: int) -> str:
        message = "%d lines were dropped here while the store was away"
        return self.format(
            logging.LogRecord(__name__, logging.WARNING, "", 0, message, (dropped,), None)
        )
