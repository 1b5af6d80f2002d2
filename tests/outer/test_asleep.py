"""A replica that stands still in the middle of a round, until the round is decided and deleted.

As a process that is stopped, or a machine whose virtual CPU is taken away. What its contribution
came to can then only be told by the ledger.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from fleet import Fleet
from replicas import Job
from torch import nn

from diloco_cloud import keys
from diloco_cloud.store.memory import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

ROUND = 3
DIRECTORY, COMMIT = keys.directory(ROUND, 0), keys.commit(ROUND, 0)
PACE = dict.fromkeys(range(3), 0.01)


class Sleeper:
    """Rank 1's store in round 3: sleeps at one point of it; rank 0 waits for rank 1 to get there.

    Attributes:
        moment: "agreeing" (before it looks for the decision), "looking" (between its look at the
            round and its look at the snapshots), "deciding" (before it creates its decision),
            "reading" (between the decision and the contributions).
    """

    def __init__(self, inner: Any, rank: int, moment: str, there: threading.Event, name: str):
        self._inner, self._rank, self._moment = inner, rank, moment
        self._there, self._bare = there, MemoryStore(name)
        self._contributed = self._read = self._slept = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _sleeps(self, moment: str) -> bool:
        return self._rank == 1 and self._moment == moment and self._contributed and not self._slept

    def _sleep_while(self, condition: Callable[[], object]) -> None:
        self._slept = True
        self._there.set()
        deadline = time.monotonic() + 30
        while condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def _is_there(self) -> object:
        return self._bare.list(DIRECTORY)

    def create(self, key: str, data: Any) -> None:
        if key == COMMIT and self._rank == 0 and self._moment in ("looking", "deciding"):
            self._there.wait(5)  # both find the round complete
        if key == COMMIT and self._sleeps("deciding"):
            self._sleep_while(self._is_there)
        self._inner.create(key, data)
        self._contributed |= key == keys.put(ROUND, 0, 1, 0)

    def list(self, prefix: str = "") -> Any:
        if prefix == DIRECTORY and self._sleeps("agreeing"):
            self._sleep_while(self._is_there)
        if prefix == keys.openings(ROUND, 0) and self._rank == 1 and self._moment == "reading":
            return []  # so that nothing has been read by the time of the decision
        if prefix == DIRECTORY and self._sleeps("reading"):
            while not self._bare.list(COMMIT):  # rank 0 decides
                time.sleep(0.002)
        return self._inner.list(prefix)

    def list_dirs(self, prefix: str = "") -> Any:
        if prefix == keys.STATE and self._sleeps("looking"):
            whole = keys.snapshot(ROUND + 1) + "manifest.json"
            self._sleep_while(lambda: not self._bare.list(whole))
        return self._inner.list_dirs(prefix)

    def get(self, key: str) -> Any:
        found = self._inner.get(key)
        self._read |= self._contributed and key == COMMIT
        return found

    def get_range(self, key: str, start: int, length: int) -> Any:
        if (
            key.startswith((DIRECTORY, keys.stream(ROUND, 0)))
            and self._read
            and self._sleeps("reading")
        ):
            self._sleep_while(self._is_there)
        return self._inner.get_range(key, start, length)


class First(dict[str, bytes]):
    """Keeps what was committed first: a decision created in a deleted round is nobody's."""

    def __contains__(self, key: object) -> bool:
        return False

    def __setitem__(self, key: str, value: bytes) -> None:
        self.setdefault(key, value)


@pytest.mark.parametrize("reduction", ["all-gather", "sharded"])
@pytest.mark.parametrize("moment", ["agreeing", "looking", "deciding", "reading"])
def test_work_counts_once_wherever_a_replica_falls_asleep(moment: str, reduction: str) -> None:
    there = threading.Event()

    class Sleepy(Fleet):
        def live(self, rank: int, attempt: int, store: Any, model: nn.Module) -> Any:
            sleeper = Sleeper(store, rank, moment, there, self.name)
            return super().live(rank, attempt, sleeper, model)

    job = Job(world_size=2, sync_every=4, steps=64, reduction=reduction)
    fleet = Sleepy(job, pace_s=PACE, commits=First())
    ends = fleet.run()
    assert there.is_set()
    assert ends[1].attempt == 0
    entry = fleet.history()[-1].ledger[1]
    assert entry.merged == entry.processed == fleet.processed[1, 0]
