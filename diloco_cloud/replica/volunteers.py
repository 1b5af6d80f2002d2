"""How many volunteer reducers there are, as their signs of life tell those who count on them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_cloud import keys
from diloco_cloud.errors import DilocoError, NotFoundError
from diloco_cloud.replica.roster import MISSED_BEATS
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)


@dataclass
class Volunteers:
    """Asks the prefix: one listing and one HEAD, and not twice within a heartbeat.

    Ages are differences between the store's own times. Now is when whoever asks last gave a sign of
    life itself: the newest of the volunteers' own says nothing, once all of them are dead.

    Attributes:
        reducers: the reducers' prefix.
        rank: whoever asks.
        home: the prefix that its own sign of life is in.
        heartbeat_s: seconds between two signs.
        now: seconds, monotonic.
    """

    reducers: ObjectStore
    rank: int
    home: ObjectStore
    heartbeat_s: float
    now: Callable[[], float] = time.monotonic
    _fresh: tuple[int, ...] = field(default=(), init=False)
    _asked_at: float | None = field(default=None, init=False)

    def __call__(self) -> int:
        """How many live."""
        return len(self.fresh())

    def place(self, index: int) -> int:
        """Where a volunteer is among those that live; its own number where it is not."""
        fresh = self.fresh()
        return fresh.index(index) if index in fresh else index

    def fresh(self) -> tuple[int, ...]:
        """Numbers of those that live, in order; none where the store does not tell."""
        now = self.now()
        if self._asked_at is None or now - self._asked_at >= self.heartbeat_s:
            self._asked_at = now
            try:
                self._fresh = self._look()
            except DilocoError as error:  # a round goes on without volunteers
                logger.warning("the reducers cannot be counted: %s", error.message)
                self._fresh = ()
        return self._fresh

    def _look(self) -> tuple[int, ...]:
        beats = {
            index: info.last_modified
            for info in self.reducers.list(keys.ALIVE)
            if (index := keys.parse_alive(info.key)) is not None
        }
        if not beats:
            return ()
        try:
            now = self.home.head(keys.alive(self.rank)).last_modified
        except NotFoundError:  # the first sign is on its way
            now = max(beats.values())
        oldest = now - MISSED_BEATS * self.heartbeat_s
        return tuple(sorted(index for index, at in beats.items() if at >= oldest))
