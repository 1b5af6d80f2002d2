"""What a faulty store and its children share: the dice, the partition, copies still under way.

Whether a fault strikes is a hash of the seed, the process, the request's method and key, and how
often that method met that key before. So a replay draws the same faults for the same requests,
however its threads take turns.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from diloco_cloud.errors import StoreError
from diloco_cloud.store.faults.settings import Faults, Windows

#: Keys whose requests are counted; those not asked for the longest time start anew.
_COUNTED: Final = 1 << 16
#: Who a process is; the core's names for it (``diloco_cloud.replica.identity``).
_RANK_ENV, _RANK_ENV_ENV, _ATTEMPT_ENV = "REPLICA_RANK", "DILOCO_RANK_ENV", "DILOCO_ATTEMPT"
_NO_RANK: Final = "launcher"


class Weather:
    """The state of one faulty store and of all its children; safe to use from any thread.

    Args:
        faults: what may happen.
        rank: whose weather it is; by default this process's, from its environment.
        attempt: which life of that rank, likewise.
        clock: seconds; windows count from now.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        faults: Faults,
        *,
        rank: int | None,
        attempt: int | None,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self.faults, self.clock, self._sleep = faults, clock, sleep
        self._opened = clock()
        name = _environ_rank() if rank is None else str(rank)
        life = os.environ.get(_ATTEMPT_ENV, "0") if attempt is None else str(attempt)
        self._who = f"{faults.seed}\0{name}.{life}"
        file = faults.partition_file.replace("{rank}", name)
        self._partition_file = Path(file).expanduser() if file else None
        self._partitioned = False
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._injected: Counter[str] = Counter()
        self._late_lock = threading.Lock()
        self._late: list[Callable[[], None]] = []
        self.skew_s = faults.clock_skew_s * (2 * Dice(self._who).uniform("skew") - 1)

    @property
    def injected(self) -> Counter[str]:
        """How often each fault struck so far."""
        with self._lock:
            return self._injected.copy()

    def count(self, kind: str) -> None:
        with self._lock:
            self._injected[kind] += 1

    def dice(self, method: str, key: str) -> Dice:
        """The dice of the next request of ``method`` for ``key``."""
        with self._lock:
            number = self._seen.pop((method, key), 0)
            self._seen[method, key] = number + 1
            if len(self._seen) > _COUNTED:
                self._seen.popitem(last=False)
        return Dice(f"{self._who}\0{method}\0{key}\0{number}")

    def strikes(self, kind: str, dice: Dice) -> bool:
        """Whether the fault of this name strikes; if so, it is counted."""
        probability: float = getattr(self.faults, kind)
        if probability == 0 or dice.uniform(kind) >= probability:
            return False
        self.count(kind)
        return True

    def wait(self, dice: Dice) -> None:
        """The delay of a request."""
        if self.faults.latency:
            self.count("latency")
            self._sleep(-self.faults.latency * math.log1p(-dice.uniform("latency")))

    def partition(self) -> None:
        """From now on nothing can be reached."""
        self._partitioned = True

    def heal(self) -> None:
        """Undo :meth:`partition`; windows and the file stay in force."""
        self._partitioned = False

    def partitioned(self) -> bool:
        """Whether nothing can be reached now."""
        return (
            self._partitioned
            or self._within(self.faults.partitions)
            or (self._partition_file is not None and self._partition_file.exists())
        )

    def expired(self) -> bool:
        """Whether the credentials are refused now, whatever the dice say."""
        return self._within(self.faults.expiries)

    def send_late(self, write: Callable[[], None]) -> None:
        """Keep the copy of a write for :meth:`deliver_late`."""
        with self._late_lock:
            self._late.append(write)

    def deliver_late(self) -> None:
        """Let the copies under way arrive; nobody waits for what the store says to them.

        Called before each request. A copy stays in the list until it has arrived, so that any
        later write of this store waits for it: it can undo others' writes, never its sender's.
        """
        if not self._late:
            return
        with self._late_lock:
            while self._late:
                with suppress(StoreError):
                    self._late[0]()
                del self._late[0]

    def _within(self, windows: Windows) -> bool:
        if not windows:
            return False
        now = self.clock() - self._opened
        return any(start <= now < end for start, end in windows)


class Dice:
    """The throws of one request, each a number of its own."""

    def __init__(self, request: str) -> None:
        # A listing's prefix may be any text, even such that UTF-8 cannot hold.
        self._request = request.encode(errors="surrogatepass")

    def uniform(self, throw: str) -> float:
        """A number in [0, 1), always the same for the same ``throw``."""
        digest = hashlib.blake2b(self._request, digest_size=8, person=throw.encode()).digest()
        return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def _environ_rank() -> str:
    return os.environ.get(os.environ.get(_RANK_ENV_ENV, _RANK_ENV)) or _NO_RANK
