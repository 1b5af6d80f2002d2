"""Which replicas of a launched run live, as the prefix tells the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from diloco_cloud import keys
from diloco_cloud.exchange.membership import Life
from diloco_cloud.run.record import list_lives, read_json
from diloco_cloud.store.base import ObjectStore

#: Heartbeats that a replica may miss before the others count on it no more.
MISSED_BEATS = 3.5


@dataclass(frozen=True)
class Roster:
    """Asks the prefix: two listings, and one read for each replica that was restarted.

    Ages are differences between the store's own times, the newest heartbeat (which is hardly older
    than this replica's own) being now; no machine's clock is believed.

    Attributes:
        store: the run's prefix.
        heartbeat_s: seconds between two heartbeats of a replica.
    """

    store: ObjectStore
    heartbeat_s: float

    def __call__(self) -> Mapping[int, Life]:
        """By rank: launched and not up yet, alive, or gone."""
        lives = list_lives(self.store)
        beats = {info.key: info.last_modified for info in self.store.list(keys.ALIVE)}
        newest = {rank: max(a for r, a in lives if r == rank) for rank, _ in lives}
        now = max(beats.values(), default=0.0)
        return {
            rank: self._life(rank, attempt, lives[rank, attempt], beats, now)
            for rank, attempt in newest.items()
        }

    def _life(
        self,
        rank: int,
        attempt: int,
        kinds: Collection[str],
        beats: Mapping[str, float],
        now: float,
    ) -> Life:
        if "outcome" in kinds:
            return "gone"
        beat_at = beats.get(keys.alive(rank))
        if beat_at is None:
            return "starting"
        if attempt > 0:
            beat = read_json(self.store, keys.alive(rank)) or {}
            if beat.get("attempt", 0) < attempt:
                return "starting"
        return "alive" if now - beat_at <= MISSED_BEATS * self.heartbeat_s else "gone"
