"""What a replica says in a round besides its contribution, and what it hears of the others."""

from __future__ import annotations

from diloco_cloud import keys
from diloco_cloud.exchange.history import History
from diloco_cloud.exchange.membership import Attendance, Membership
from diloco_cloud.store.base import ObjectStore


class Words:
    """One life of one rank among the others."""

    store: ObjectStore
    rank: int
    attempt: int
    membership: Membership
    history: History

    @property
    def expected(self) -> list[int]:
        """Ranks whose part the next round waits for, as far as is known before it."""
        nobody = Attendance.of([], self.history.round, 0)
        return sorted(self.membership.expected(nobody, self.history, {}, cold=False))

    def planned_parallel(self, fragment: int, unplanned: int) -> int:
        """Requests of a fragment's next round that are under way at once, as planned or else."""
        plan = self.history.plans.get(fragment)
        return unplanned if plan is None else plan.parallel

    def announce(self, round_: int, fragment: int) -> None:
        """Say that this life has come up to the open round, and will be in it."""
        if not self.membership.is_strict:
            self.store.put(keys.join(round_, fragment, self.rank, self.attempt), b"")

    def depart(self, round_: int, fragment: int) -> None:
        """Say that this life ends, so that nobody waits for it."""
        if not self.membership.is_strict:
            self.store.put(keys.away(round_, fragment, self.rank, self.attempt), b"")

    def leave(self, round_: int, fragment: int) -> None:
        """Say that this replica contributes no more, from ``round_`` on."""
        self.store.put(keys.leave(round_, fragment, self.rank, self.attempt), b"")

    def look(self, round_: int, fragment: int) -> Attendance:
        """Who is in an open round."""
        listed = self.store.list(keys.directory(round_, fragment))
        return Attendance.of(listed, round_, fragment, self.history)

    def still_going(self, round_: int, fragment: int) -> set[int]:
        """Ranks that this round waits for and that have not left."""
        seen, rules = self.look(round_, fragment), self.membership
        lives = {} if rules.is_strict else rules.roster()
        return rules.expected(seen, self.history, lives, cold=False)
