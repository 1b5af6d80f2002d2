"""Whether a run is over, as one finds who serves its replicas and is none of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from diloco_cloud import keys
from diloco_cloud.errors import DilocoError, NotFoundError
from diloco_cloud.result import read_result
from diloco_cloud.run.lives import Life, Lives, read_lives
from diloco_cloud.run.record import read_json
from diloco_cloud.run.spec import RunSpec
from diloco_cloud.run.status import is_whole
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)

#: Heartbeats between two looks: an end need not be noticed at once, and each look is billed.
_BEATS: Final = 3
#: Seconds without a sign of life of any replica after which nobody is waited for. Those that are
#: started again, or at last find a machine, find reducers started again too.
SILENCE_S: Final = 900.0


@dataclass
class RunEnd:
    """Asks the prefix now and then: two listings, and a read for each life that has ended.

    Attributes:
        store: the run's prefix.
        spec: of the run.
        silence_s: after which the replicas are given up.
        now: seconds, monotonic.
        why: the run is over; None while it goes on.
        unheard: it may go on later: nobody has said that it is over.
    """

    store: ObjectStore
    spec: RunSpec
    silence_s: float = SILENCE_S
    now: Callable[[], float] = time.monotonic
    why: str | None = field(default=None, init=False)
    unheard: bool = field(default=False, init=False)
    _asked_at: float | None = field(default=None, init=False)
    _heard_at: float = field(init=False)
    _newest_beat: float | None = field(default=None, init=False)
    _done: dict[Life, bool] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._heard_at = self.now()

    def __call__(self) -> bool:
        """Whether the run is over, as of the last look; looks where that was long ago."""
        now = self.now()
        due = self._asked_at is None or now - self._asked_at >= _BEATS * self.spec.heartbeat
        if self.why is None and due:
            self._asked_at = now
            try:
                self.why = self._look(now)
            except DilocoError as error:
                logger.warning("the run cannot be looked at: %s", error.message)
            if self.why is None and now - self._heard_at > self.silence_s:
                self.why = f"no replica has been heard of for {self.silence_s:.0f} s"
                self.unheard = True
        return self.why is not None

    def _look(self, now: float) -> str | None:
        lives = read_lives(self.store)
        if not lives.kinds and not self._exists():
            return "the run was deleted"
        newest = {rank: lives.newest(rank) or 0 for rank, _ in lives.kinds}
        if newest and all(self._is_done(life, lives) for life in newest.items()):
            return "all replicas have ended"
        if any("outcome" in kinds for kinds in lives.kinds.values()) and self._has_result():
            return "the run's result is there"
        beat = max((info.last_modified for info in self.store.list(keys.ALIVE)), default=None)
        if beat != self._newest_beat:  # by our own clock: the store's times are only compared
            self._newest_beat, self._heard_at = beat, now
        return None

    def _exists(self) -> bool:
        try:
            self.store.head(keys.RUN)
        except NotFoundError:
            return False
        return True

    def _is_done(self, life: Life, lives: Lives) -> bool:
        """Whether a rank's newest life has ended, or is to, and none comes after it."""
        kinds = lives.of(*life)
        if "cancel" in kinds or "stopped" in kinds:
            return True
        if "outcome" not in kinds:
            return False
        if life not in self._done:
            outcome = read_json(self.store, keys.outcome(*life)) or {}
            again = outcome.get("restartable") is True and self.spec.max_restarts > 0
            self._done[life] = not again
        return self._done[life]

    def _has_result(self) -> bool:
        result = read_result(self.store)
        if result is None:
            return False
        rounds = self.spec.rounds
        return is_whole(result.manifest, None if rounds is None else rounds * self.spec.fragments)
