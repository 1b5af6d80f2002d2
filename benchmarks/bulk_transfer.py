"""The limit: as many bytes as an exchange moves, up and down at once, and nothing else.

The same client library with eight requests of 8 MiB under way each way: no rounds, no waiting for
anybody, no arithmetic. What comes down was there before. An exchange cannot be faster over the same
links unless it moves fewer bytes.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from diloco_cloud.store.base import ObjectStore

PART_BYTES = 8 * 2**20
PARALLEL = 8


@dataclass
class BulkTransfer:
    """One replica's bulk transfers.

    Attributes:
        store: the shared prefix.
        rank: of this replica.
        replicas: how many there are.
        up: bytes to send in a round.
        down: bytes to receive in a round, of what the others sent in :meth:`prepare`.
        source: what is sent, from its start and again from there.
    """

    store: ObjectStore
    rank: int
    replicas: int
    up: int
    down: int
    source: memoryview

    def prepare(self) -> None:
        """Put there what the others' rounds read, as much as this replica sends in one."""
        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(lambda part: self._put("there", *part), enumerate(_parts(self.up))))

    def round(self, number: int) -> None:
        """Move the bytes of one round, both ways at once."""
        there = [
            (rank, index, size)
            for rank in _others(self.rank, self.replicas)
            for index, size in enumerate(_parts(self.up))
        ]
        with ThreadPoolExecutor(PARALLEL) as up, ThreadPoolExecutor(PARALLEL) as down:
            sent = [
                up.submit(self._put, f"up/{number}", index, size)
                for index, size in enumerate(_parts(self.up))
            ]
            received, left = [], self.down
            for rank, index, size in itertools.cycle(there):
                if left <= 0:
                    break
                key = f"there/{rank}/{index}"
                received.append(down.submit(self.store.get_range, key, 0, min(size, left)))
                left -= min(size, left)
            for future in received:
                future.result()
            for other in sent:
                other.result()

    def _put(self, directory: str, index: int, size: int) -> None:
        start = index * PART_BYTES % max(len(self.source) - size, 1)
        self.store.put(f"{directory}/{self.rank}/{index}", self.source[start : start + size])


def _parts(nbytes: int) -> list[int]:
    """Sizes of the parts that ``nbytes`` are moved in."""
    whole, rest = divmod(nbytes, PART_BYTES)
    return [PART_BYTES] * whole + [rest] * bool(rest)


def _others(rank: int, replicas: int) -> list[int]:
    """The other replicas, beginning with the next, so that not all read the same at once."""
    return [(rank + step) % replicas for step in range(1, replicas)]
