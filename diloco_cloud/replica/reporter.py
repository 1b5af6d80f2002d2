"""The heartbeat of a replica, its per-round metrics, and the record of how it ended."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import queue
import socket
import threading
import traceback
from importlib import metadata
from typing import TYPE_CHECKING, Any

from diloco_cloud.errors import AlreadyExistsError, DilocoError
from diloco_cloud.replica.identity import Identity
from diloco_cloud.replica.logs import LogShipper, timestamp
from diloco_cloud.run import keys
from diloco_cloud.store.base import ObjectStore

if TYPE_CHECKING:
    from diloco_cloud.outer.progress import Progress, RoundReport

logger = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
LOG_S = 2.0


class Reporter:
    """Writes what the run's readers see of this replica, from a thread of its own.

    A store that fails here costs visibility, never the training: failures are logged and the next
    beat tries again.

    Args:
        store: the run's prefix.
        identity: of this replica.
        logs: the shipper whose lines are sent along.
        heartbeat_s: seconds between two beats.
    """

    def __init__(
        self,
        store: ObjectStore,
        identity: Identity,
        logs: LogShipper,
        *,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._store = store
        self._identity = identity
        self._logs = logs
        self._heartbeat_s = heartbeat_s
        self._progress: Progress | None = None
        self._state = "starting"
        self._metrics: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="diloco-reporter", daemon=True)
        self._versions = _versions()

    def start(self) -> None:
        """Send the first beat and begin the regular ones."""
        self._beat()
        self._thread.start()

    def follow(self, progress: Progress) -> None:
        """Report ``progress`` from now on."""
        self._progress = progress

    def on_round(self, report: RoundReport) -> None:
        """Queue a round's metrics."""
        place = (self._identity.rank, self._identity.attempt)
        self._metrics.put((keys.metrics(*place, report.round), _metrics(report)))

    def end(
        self,
        state: str,
        *,
        result: Any = None,
        digest: str | None = None,
        error: BaseException | None = None,
        exit_code: int = 0,
        reason: str | None = None,
    ) -> None:
        """Stop reporting and record how this life ended."""
        self._stop.set()
        self._logs.full.set()
        if self._thread.is_alive():
            self._thread.join()
        self._state = state
        self._progress_state = None
        outcome = {
            "rank": self._identity.rank,
            "attempt": self._identity.attempt,
            "state": state,
            "exit_code": exit_code,
            "reason": reason,
            "error": None if error is None else _one_line(error),
            "traceback": None if error is None else "".join(traceback.format_exception(error)),
            "result": _as_json(result),
            "digest": digest,
            "ended_at": timestamp(),
        }
        with self._survive("outcome"), contextlib.suppress(AlreadyExistsError):
            key = keys.outcome(self._identity.rank, self._identity.attempt)
            self._store.create(key, json.dumps(outcome).encode())
        self._drain()
        self._beat()

    def _run(self) -> None:
        waited = self._heartbeat_s
        while not self._stop.is_set():
            if waited >= self._heartbeat_s:
                waited = 0.0
                self._beat()
            self._drain()
            self._logs.full.wait(LOG_S)
            waited += LOG_S

    def _drain(self) -> None:
        self._logs.ship()
        while True:
            try:
                key, figures = self._metrics.get_nowait()
            except queue.Empty:
                return
            with self._survive("metrics"):
                self._store.put(key, json.dumps(figures).encode())

    def _beat(self) -> None:
        beat: dict[str, Any] = {"state": self._state}
        if self._progress is not None:
            beat = {**self._progress.snapshot()}
            if self._stop.is_set():
                beat["state"] = self._state
        beat |= {
            "rank": self._identity.rank,
            "attempt": self._identity.attempt,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": timestamp(),
            "versions": self._versions,
        }
        with self._survive("heartbeat"):
            self._store.put(keys.alive(self._identity.rank), json.dumps(beat).encode())

    @contextlib.contextmanager
    def _survive(self, what: str) -> Any:
        try:
            yield
        except DilocoError as error:
            logger.warning("the %s could not be written: %s", what, error)


def _metrics(report: RoundReport) -> dict[str, Any]:
    progress = report.progress
    return {
        **report.metrics,
        "round": report.round,
        "step": report.step,
        "fragment": report.fragment,
        "decision": report.decision,
        "participants": report.participants,
        "inner_step": progress["inner_step"],
        "loss": progress["loss"],
        "tokens": progress["tokens"],
        "tokens_per_s": progress["tokens_per_s"],
        "seconds_blocked": report.seconds_blocked,
        "seconds_exchange": report.seconds_exchange,
        "bytes_sent": report.usage.bytes_sent,
        "bytes_received": report.usage.bytes_received,
        "requests": sum(report.usage.requests.values()),
        "base": report.base,
        "time": timestamp(),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("diloco-cloud", "torch", "torchft", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _one_line(error: BaseException) -> str:
    text = error.message if isinstance(error, DilocoError) else str(error)
    return (
        f"{type(error).__name__}: {text.strip().splitlines()[0]}" if text.strip() else repr(error)
    )


def _as_json(value: Any) -> Any:
    """``value`` if JSON can hold it, else its representation."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)
    return value
