"""What a replica tells its run: how it is, its log, its per-round metrics, and how it ended."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from diloco_cloud import keys
from diloco_cloud.errors import AlreadyExistsError, DilocoError
from diloco_cloud.replica.heartbeat import HEARTBEAT_S, Heartbeat
from diloco_cloud.replica.identity import Identity
from diloco_cloud.replica.outcome import Outcome, timestamp
from diloco_cloud.replica.shipper import LogShipper
from diloco_cloud.store.base import ObjectStore

if TYPE_CHECKING:
    from diloco_cloud.outer.progress import RoundReport

logger = logging.getLogger(__name__)

LOG_S = 2.0
#: Seconds that the end of a replica waits for the store to take what it has to tell. Nothing but
#: the machine's time hangs on it, and a store may be as slow as this while many replicas end.
JOIN_S = 60.0


class Reporter:
    """Writes what the run's readers see of this replica, from threads of its own.

    What fails here costs visibility, never the training: failures are logged and the next beat
    tries again.

    Args:
        store: the run's prefix.
        identity: of this replica.
        logs: the shipper whose lines are sent along.
        heartbeat_s: seconds between two beats.
        now: seconds, monotonic.

    Attributes:
        heartbeat: tells what to show.
    """

    def __init__(
        self,
        store: ObjectStore,
        identity: Identity,
        logs: LogShipper,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.heartbeat = Heartbeat(store, identity, period_s=heartbeat_s, now=now)
        self._store = store
        self._identity = identity
        self._logs = logs
        self._metrics: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="diloco-reporter", daemon=True)

    def start(self) -> None:
        """Begin to report; the first beat is sent at once."""
        self.heartbeat.start()
        self._thread.start()

    def on_round(self, report: RoundReport) -> None:
        """Queue a round's metrics."""
        place = (self._identity.rank, self._identity.attempt)
        self._metrics.put((keys.metrics(*place, report.round), _metrics(report)))

    def record(self, outcome: Outcome) -> None:
        """Record how this life ended; the first record stands. May be called from any thread."""
        self.heartbeat.end(outcome.state)
        key = keys.outcome(self._identity.rank, self._identity.attempt)
        with self._survive("outcome"), contextlib.suppress(AlreadyExistsError):
            self._store.create(key, json.dumps(outcome.to_json(self._identity)).encode())

    def ship_soon(self) -> None:
        """Send the log as soon as the thread for it can; from any thread."""
        self._logs.full.set()

    def close(self, *, join_s: float = JOIN_S) -> None:
        """Stop reporting; send what is left and a last beat.

        Args:
            join_s: seconds to wait for requests that are under way; they are then left to
                themselves.
        """
        deadline = time.monotonic() + join_s

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        self._stop.set()
        self.ship_soon()
        self.heartbeat.stop()
        if self._thread.is_alive():
            self._thread.join(left())
        logged = self._drain(left())
        self.heartbeat.close(join_s=left(), logged=logged)

    def end(self, outcome: Outcome, *, join_s: float = JOIN_S) -> None:
        """Record ``outcome`` and stop. The record comes first: a stuck request can't delay it."""
        self.record(outcome)
        self.close(join_s=join_s)

    def _run(self) -> None:
        while True:
            self._drain()
            if self._stop.is_set():  # Looked at after drain(), which takes back the call to wake.
                return
            self._logs.full.wait(LOG_S)

    def _drain(self, wait_s: float = JOIN_S) -> bool:
        """Send all there is; whether the log has arrived."""
        logged = self._logs.ship(wait_s=wait_s)
        while True:
            try:
                key, figures = self._metrics.get_nowait()
            except queue.Empty:
                return logged
            with self._survive("metrics"):
                self._store.put(key, json.dumps(figures).encode())

    @contextlib.contextmanager
    def _survive(self, what: str) -> Iterator[None]:
        try:
            yield
        except DilocoError as error:
            logger.warning("the %s could not be written: %s", what, error)
        except Exception:  # such as a figure that JSON cannot hold
            logger.warning("the %s could not be written", what, exc_info=True)


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
