"""Announcing that replicas are about to be started, so that nobody else starts them.

An intent is created once per life: whoever creates it starts the life, and another launcher or
supervisor that wanted to has lost. Its age is that of the work on the start, as it is written again
while the backend takes its time; one that has grown old belongs to a starter that died, and the
next attempt is somebody else's to make.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from diloco_cloud import keys
from diloco_cloud.errors import DilocoError
from diloco_cloud.run.record import create_json, dump
from diloco_cloud.run.restart import RENEWAL_S
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)

StartedBy: TypeAlias = Literal["launch", "resume", "supervisor"]


@dataclass(frozen=True, kw_only=True)
class Start:
    """Lives that are begun together.

    Attributes:
        ranks: whose.
        attempt: which life of theirs.
        backend: entry-point name of the backend they run on.
        world_size: how many replicas the run has, as its trainers will be told.
        by: who starts them.
        after: by rank, why the life before ended.
        in_a_row: how many restarts a rank has had, with this one, since it was last in a round.
    """

    ranks: Sequence[int]
    attempt: int
    backend: str
    world_size: int
    by: StartedBy
    after: Mapping[int, str] = field(default_factory=dict)
    in_a_row: int = 0

    def intent(self, rank: int, at: float) -> dict[str, Any]:
        """What is written down for one rank before it is started."""
        return {
            "rank": rank,
            "attempt": self.attempt,
            "backend": self.backend,
            "world_size": self.world_size,
            "by": self.by,
            "after": self.after.get(rank),
            "in_a_row": self.in_a_row,
            "host": platform.node(),
            "requested_at": at,
        }


def announce(store: ObjectStore, start: Start, *, at: float) -> list[int]:
    """Write the intents; returns the ranks that nobody else is starting.

    Args:
        store: the run's own prefix.
        start: what is to be started.
        at: seconds since the epoch.
    """
    return [
        rank
        for rank in start.ranks
        if create_json(store, keys.intent(rank, start.attempt), start.intent(rank, at))
    ]


@contextlib.contextmanager
def kept_fresh(store: ObjectStore, start: Start, *, at: float) -> Iterator[None]:
    """Renew the intents while the block runs: an image may take minutes to be built."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(RENEWAL_S):
            try:
                for rank in start.ranks:
                    store.put(keys.intent(rank, start.attempt), dump(start.intent(rank, at)))
            except DilocoError as error:
                logger.warning("the intent to start replicas could not be renewed: %s", error)

    thread = threading.Thread(target=renew, name="diloco-intents", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(RENEWAL_S)  # a write that hangs does no harm when it comes through
