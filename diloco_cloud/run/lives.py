"""The lives of a run's replicas, as one listing of ``replicas/`` tells them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from diloco_cloud import keys
from diloco_cloud.store.base import ObjectStore

#: One life of one rank: rank and attempt.
Life: TypeAlias = tuple[int, int]

_LIFE = re.compile(r"replicas/(\d+)/(\d+)(?:\.(\w+))?\.json")
_SIZE = re.compile(r"replicas/size\.(\d+)\.json")
_SUPERVISOR = re.compile(r"replicas/supervisor\.\w+\.json")


@dataclass(frozen=True)
class Lives:
    """Which objects each life has left, and since when.

    Attributes:
        kinds: by life, when each of its objects was written, by the store's clock: "intent",
            "handle", "claim", "outcome", "cancel", "hung", "stopped".
        size_number: of the newest change of the run's size; 0 if it never changed.
        size_at: when that was, by the store's clock.
        supervised_at: when a supervisor last gave a sign of life, by the store's clock.
    """

    kinds: Mapping[Life, Mapping[str, float]] = field(default_factory=dict)
    size_number: int = 0
    size_at: float | None = None
    supervised_at: float | None = None

    def of(self, rank: int, attempt: int) -> Mapping[str, float]:
        """The objects of one life."""
        return self.kinds.get((rank, attempt), {})

    def newest(self, rank: int) -> int | None:
        """The newest attempt of a rank; None if nobody has meant to start it yet."""
        return max((attempt for r, attempt in self.kinds if r == rank), default=None)

    def launched_as(self, rank: int, attempt: int) -> int | None:
        """The attempt whose handle finds a life; None if there is no handle yet.

        It is its own, unless the provider restarted the process by itself: that life has claimed
        the next number, and nobody has launched it.
        """
        for earlier in range(attempt, -1, -1):
            kinds = self.of(rank, earlier)
            if "handle" in kinds:
                return earlier
            if "intent" in kinds:
                return None
        return None

    def restarts(self, rank: int) -> int:
        """How often a rank was started again."""
        started = sum("handle" in kinds for life, kinds in self.kinds.items() if life[0] == rank)
        return max(0, started - 1)

    @property
    def ranks(self) -> int:
        """One more than the highest rank there is."""
        return max((rank for rank, _ in self.kinds), default=-1) + 1


def read_lives(store: ObjectStore) -> Lives:
    """List ``replicas/``: one request, whatever the number of replicas up to a thousand objects."""
    kinds: dict[Life, dict[str, float]] = {}
    size_number, size_at, supervised_at = 0, None, None
    for info in store.list(keys.REPLICAS):
        if life := _LIFE.fullmatch(info.key):
            found = kinds.setdefault((int(life[1]), int(life[2])), {})
            found[life[3] or "handle"] = info.last_modified
        elif size := _SIZE.fullmatch(info.key):
            size_number, size_at = int(size[1]), info.last_modified  # listed in order
        elif _SUPERVISOR.fullmatch(info.key):
            supervised_at = max(supervised_at or 0.0, info.last_modified)
    return Lives(kinds, size_number, size_at, supervised_at)
