"""A replica's sign of life in the run's prefix."""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from typing import Any, Protocol

from diloco_cloud import keys
from diloco_cloud.errors import DilocoError
from diloco_cloud.replica.identity import Identity
from diloco_cloud.replica.outcome import timestamp
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)

#: By default; a run's spec says it.
HEARTBEAT_S = 5.0


class Shows(Protocol):
    """What a heartbeat can tell of."""

    def snapshot(self) -> dict[str, Any]:
        """What is to be seen now, as JSON values; ``state`` is one of them."""


class Heartbeat:
    """Writes ``alive/<rank>.json`` now and then, from a thread that does nothing else.

    Others go by it: a replica whose log is stuck on its way to the store must not seem dead.

    Args:
        store: the run's prefix.
        identity: of this replica.
        period_s: seconds between two beats.
        now: seconds, monotonic.
    """

    def __init__(
        self,
        store: ObjectStore,
        identity: Identity,
        *,
        period_s: float = HEARTBEAT_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._identity = identity
        self._period_s = period_s
        self._now = now
        self._progress: Shows | None = None
        self._announced: str | None = None
        self._ended: str | None = None
        self._logged = False
        self._wake = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="diloco-heartbeat", daemon=True)
        self._versions = _versions()

    def start(self) -> None:
        """Begin; the first beat is sent at once."""
        self._thread.start()

    def follow(self, progress: Shows) -> None:
        """Show ``progress`` from now on."""
        self._progress = progress

    def announce(self, state: str) -> None:
        """Show ``state`` instead of the trainer's phase from now on, and at once; any thread."""
        self._announced = state
        self._wake.set()

    def end(self, state: str) -> None:
        """Show that this life has ended, from now on, and at once; any thread."""
        self._ended = state
        self._wake.set()

    def stop(self) -> None:
        """Have the thread end."""
        self._stop = True
        self._wake.set()

    def close(self, *, join_s: float, logged: bool = False) -> None:
        """Send a last beat.

        Args:
            join_s: seconds to wait for a beat that is under way; it is then left to itself.
            logged: whether all that this life had to say is in the run's prefix.
        """
        self._logged = logged
        self.stop()
        if self._thread.is_alive():
            self._thread.join(join_s)
        self._beat()

    def _run(self) -> None:
        due = self._now()
        while not self._stop:
            if self._now() >= due or self._wake.is_set():
                self._wake.clear()
                due = self._now() + self._period_s
                self._beat()
            self._wake.wait(max(0.0, due - self._now()))

    def _beat(self) -> None:
        try:
            self._store.put(keys.alive(self._identity.rank), self._body())
        except DilocoError as error:
            logger.warning("the heartbeat could not be written: %s", error)
        except Exception:  # such as a figure that JSON cannot hold
            logger.warning("the heartbeat could not be written", exc_info=True)

    def _body(self) -> bytes:
        beat = {"state": "starting"} if self._progress is None else self._progress.snapshot()
        beat |= {
            "state": self._ended or self._announced or beat["state"],
            "rank": self._identity.rank,
            "attempt": self._identity.attempt,
            "logged": self._logged,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": timestamp(),
            "versions": self._versions,
        }
        return json.dumps(beat).encode()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("diloco-cloud", "torch", "torchft", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
