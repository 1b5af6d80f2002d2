"""Faults by schedule: who meets what, and when; drawn once, so that it can be replayed."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from diloco_cloud.chaos.records import WarmReplica

logger = logging.getLogger(__name__)

#: kill: SIGKILL. stop: SIGSTOP, and SIGCONT later. partition: the store is out of reach a while.
Kind: TypeAlias = Literal["kill", "stop", "partition"]

#: Faults of a storm in proportion, as ft-diloco met them: 28 kills, 9 partitions, 8 stops.
_SHARES: Final[dict[Kind, int]] = {"kill": 28, "partition": 9, "stop": 8}
#: Shortest and longest, in seconds; ft-diloco's, too.
_SECONDS: Final[dict[Kind, tuple[float, float]]] = {
    "kill": (0.0, 0.0),
    "partition": (15.0, 40.0),
    "stop": (10.0, 30.0),
}
#: Seconds between two looks for a replica that is not there to be hit.
_LOOK_S: Final = 0.02


@dataclass(frozen=True)
class Fault:
    """What is to happen.

    Attributes:
        at: seconds from the storm's beginning.
        seconds: how long it lasts; 0 for a kill.
    """

    at: float
    kind: Kind
    rank: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Injection:
    """What has happened.

    Attributes:
        fault: as scheduled.
        time: seconds since the epoch.
        attempt: the life that it met; None where the rank had none within the time for it.
    """

    fault: Fault
    time: float
    attempt: int | None


def poisson_storm(
    *, seed: int, replicas: int, seconds: float, per_hour: float, scale: float = 1.0
) -> tuple[Fault, ...]:
    """Faults at random times on random ranks.

    Args:
        seed: of everything that is drawn.
        replicas: number of ranks.
        seconds: length of the storm.
        per_hour: faults in an hour of the time that the storm stands for.
        scale: how much faster than that it goes by.
    """
    chance = random.Random(seed)
    faults: list[Fault] = []
    at = 0.0
    while (at := at + chance.expovariate(per_hour * scale / 3600)) < seconds:
        (kind,) = chance.choices(list(_SHARES), list(_SHARES.values()))
        rank = chance.randrange(replicas)
        shortest, longest = _SECONDS[kind]
        faults.append(Fault(at, kind, rank, chance.uniform(shortest, longest) / scale))
    return tuple(faults)


def renewal_kills(
    *, seed: int, replicas: int, seconds: float, mean_s: float, least_s: float
) -> tuple[Fault, ...]:
    """Kills of each rank, ``mean_s`` apart on average and never closer than ``least_s``.

    Args:
        seed: of everything that is drawn.
        replicas: number of ranks.
        seconds: length of the storm.
        mean_s: seconds from one kill of a rank to its next, on average.
        least_s: what a rank needs to be back.
    """
    faults: list[Fault] = []
    for rank in range(replicas):
        chance = random.Random(f"{seed}.{rank}")
        at = -least_s  # as if all had just come back
        while (at := at + least_s + chance.expovariate(1 / (mean_s - least_s))) < seconds:
            faults.append(Fault(at, "kill", rank))
    return tuple(sorted(faults, key=lambda fault: fault.at))


@dataclass
class Storm:
    """Lets a schedule happen to the processes of a run.

    Attributes:
        schedule: what is to happen.
        replica: the live process of a rank, or None.
        partitions: where a file named like a rank cuts it off from the store.
        injected: what has happened is added there.
        may_hit: asked before a replica is hit; while it says no, the fault is put off.
        patience_s: how long a fault is put off at most.
    """

    schedule: Sequence[Fault]
    replica: Callable[[int], WarmReplica | None]
    partitions: Path
    injected: list[Injection] = field(default_factory=list)
    may_hit: Callable[[Fault], bool] = lambda _fault: True
    patience_s: float = 30.0
    _undo: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list, init=False)
    _number: Iterator[int] = field(default_factory=itertools.count, init=False)
    _cut_off: Counter[int] = field(default_factory=Counter, init=False)

    def run(self, stopped: threading.Event, *, seconds: float) -> None:
        """Inject until the schedule has been worked off, ``seconds`` have passed, or it is stopped.

        What lasts is over when this returns.

        Args:
            stopped: ends it early.
            seconds: length of the storm.
        """
        self.partitions.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        waiting = sorted(self.schedule, key=lambda fault: fault.at, reverse=True)
        put_off: list[Fault] = []
        try:
            while not stopped.is_set() and (now := time.monotonic() - began) < seconds:
                while waiting and waiting[-1].at <= now:
                    put_off.append(waiting.pop())
                put_off = [fault for fault in put_off if not self._try(fault, now)]
                self._end_what_is_over(now)
                stopped.wait(_LOOK_S)
        finally:
            self._end_what_is_over(float("inf"))

    def _try(self, fault: Fault, now: float) -> bool:
        """Whether a fault has been dealt with."""
        replica = self.replica(fault.rank)
        if replica is not None and self.may_hit(fault):
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                self._inject(fault, replica, now)
                self.injected.append(Injection(fault, time.time(), replica.attempt))
                logger.info("%s replica %d (attempt %d)", fault.kind, fault.rank, replica.attempt)
                return True
        if now - fault.at < self.patience_s:
            return False
        self.injected.append(Injection(fault, time.time(), None))
        return True

    def _inject(self, fault: Fault, replica: WarmReplica, now: float) -> None:
        if fault.kind == "partition":
            self._cut_off[fault.rank] += 1
            (self.partitions / str(fault.rank)).touch()
            self._later(now + fault.seconds, lambda: self._reconnect(fault.rank))
            return
        # A descriptor, because a pid may be another process's by the time of the SIGCONT.
        process = os.pidfd_open(replica.pid)
        if fault.kind == "kill":
            signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)
        else:
            signal.pidfd_send_signal(process, signal.SIGSTOP)
            self._later(now + fault.seconds, lambda: _go_on(process))

    def _later(self, at: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._undo, (at, next(self._number), action))

    def _reconnect(self, rank: int) -> None:
        self._cut_off[rank] -= 1
        if self._cut_off[rank] == 0:
            (self.partitions / str(rank)).unlink()

    def _end_what_is_over(self, now: float) -> None:
        while self._undo and self._undo[0][0] <= now:
            heapq.heappop(self._undo)[2]()


def _go_on(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # killed while it was stopped
        signal.pidfd_send_signal(process, signal.SIGCONT)
    os.close(process)
