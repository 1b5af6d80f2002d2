"""What the decisions so far say of every replica: its standing, and the fate of its tokens.

Every decision carries all standings and the ledger of its fragment, so that whoever reads the
newest decision of each fragment knows them without the older ones, which are deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from diloco_cloud.exchange import planning, wire
from diloco_cloud.exchange.prediction import Plan

if TYPE_CHECKING:
    from diloco_cloud.exchange.commit import Commit


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a rank was when it was last in a round.

    Attributes:
        attempt: the life that was in it; older lives are no longer heard.
        round: the round.
        position: inner steps of its data that are behind it.
    """

    rank: int
    attempt: int
    round: int
    position: int


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """What became of the tokens that a rank has processed, as far as one fragment is concerned.

    The ledger balances: ``processed == merged + discarded``, as every contribution says how many
    tokens its life had processed in all, and each of them is to be in exactly one contribution.
    Work that missed a round is in a later contribution; work that died with its process was never
    in one, and is done again.

    Attributes:
        attempt: the newest life that contributed.
        life: tokens that life had processed at its newest contribution.
        processed: the same over all lives of the rank.
        merged: tokens whose pseudo-gradient is in the global parameters.
        discarded: tokens whose contribution was left out, such as for NaN.
    """

    rank: int
    attempt: int = -1
    life: int = 0
    processed: int = 0
    merged: int = 0
    discarded: int = 0

    @property
    def balance(self) -> int:
        """Tokens without a fate; 0."""
        return self.processed - self.merged - self.discarded

    def add(self, *, attempt: int, life: int, tokens: int, merged: bool) -> LedgerEntry:
        """The entry after another contribution.

        Args:
            attempt: the life that made it.
            life: tokens that life has processed in all.
            tokens: that the contribution accounts for.
            merged: whether it is in the mean.
        """
        before = self.life if attempt == self.attempt else 0
        return LedgerEntry(
            rank=self.rank,
            attempt=attempt,
            life=life,
            processed=self.processed + life - before,
            merged=self.merged + (tokens if merged else 0),
            discarded=self.discarded + (0 if merged else tokens),
        )


@dataclass
class History:
    """The run so far, as every replica knows it after the same round.

    Attributes:
        round: decisions it includes.
        finished: ranks that have left the run.
        standings: by rank.
        ledgers: by fragment and rank.
        layouts: by fragment, the digest of the tensors that were averaged last.
        plans: by fragment, how its next round is to be reduced, where that was decided.
    """

    round: int = 0
    finished: tuple[int, ...] = ()
    standings: dict[int, Standing] = field(default_factory=dict)
    ledgers: dict[int, dict[int, LedgerEntry]] = field(default_factory=dict)
    layouts: dict[int, str] = field(default_factory=dict)
    plans: dict[int, Plan] = field(default_factory=dict)

    @property
    def members(self) -> list[int]:
        """Ranks that were in the last round and have not left: the next round waits for them."""
        return [
            one.rank
            for one in self.standings.values()
            if one.round == self.round - 1 and one.rank not in self.finished
        ]

    def attempt_of(self, rank: int) -> int:
        """The newest life of a rank that was in a round; 0 before."""
        known = self.standings.get(rank)
        return 0 if known is None else known.attempt

    def is_member(self, rank: int, attempt: int) -> bool:
        """Whether this very life was in the last round."""
        one = self.standings.get(rank)
        return one is not None and (one.attempt, one.round) == (attempt, self.round - 1)

    def note(self, commit: Commit, *, applied: bool) -> None:
        """Take in a decision.

        Args:
            commit: the decision of round ``self.round``.
            applied: whether there was a mean to apply; if not, nothing of it is merged.
        """
        self.round = commit.round + 1
        self.finished = commit.finished
        self.standings = {one.rank: one for one in commit.standings}
        ledger = {one.rank: one for one in commit.ledger}
        if not applied:
            for one in commit.contributors:
                ledger[one.rank] = _unmerged(ledger[one.rank], one.tokens)
        self.ledgers[commit.fragment] = ledger
        if commit.layout:
            self.layouts[commit.fragment] = commit.layout
        if commit.next is not None:
            self.plans[commit.fragment] = commit.next

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, for a snapshot's manifest."""
        return {
            "round": self.round,
            "finished": list(self.finished),
            "standings": [vars(one) for one in self.standings.values()],
            "ledgers": [
                [fragment, [vars(entry) for entry in entries.values()]]
                for fragment, entries in self.ledgers.items()
            ],
            "layouts": [list(item) for item in self.layouts.items()],
            "plans": [[key, planning.plan_json(one)] for key, one in self.plans.items()],
        }

    @classmethod
    def from_json(cls, values: Any) -> History:
        """Rebuild a history; raises what :func:`diloco_cloud.exchange.wire.parse` expects."""

        def ledger(item: Any) -> tuple[int, dict[int, LedgerEntry]]:
            fragment, entries = item
            return wire.count(fragment), {one.rank: one for one in ledger_entries(entries)}

        def layout(item: Any) -> tuple[int, str]:
            fragment, digest = item
            return wire.count(fragment), wire.text(digest)

        def plan(item: Any) -> tuple[int, Plan]:
            fragment, chosen = item
            return wire.count(fragment), planning.plan(chosen)

        kinds: Mapping[str, Callable[[Any], Any]] = {
            "round": wire.count,
            "finished": wire.many(wire.count),
            "standings": standings,
            "ledgers": wire.many(ledger),
            "layouts": wire.many(layout),
            "plans": wire.many(plan),
        }
        read = wire.fields(values, kinds)
        return cls(
            round=read["round"],
            finished=read["finished"],
            standings={one.rank: one for one in read["standings"]},
            ledgers=dict(read["ledgers"]),
            layouts=dict(read["layouts"]),
            plans=dict(read["plans"]),
        )

    def copy(self) -> History:
        """A copy that later decisions do not change."""
        return History(
            self.round,
            self.finished,
            dict(self.standings),
            {fragment: dict(entries) for fragment, entries in self.ledgers.items()},
            dict(self.layouts),
            dict(self.plans),
        )


def update_standings(
    standings: Iterable[Standing], present: Iterable[Standing]
) -> tuple[Standing, ...]:
    """All standings after a round, by rank."""
    merged = {one.rank: one for one in standings} | {one.rank: one for one in present}
    return tuple(merged[rank] for rank in sorted(merged))


def _unmerged(entry: LedgerEntry, tokens: int) -> LedgerEntry:
    return LedgerEntry(
        rank=entry.rank,
        attempt=entry.attempt,
        life=entry.life,
        processed=entry.processed,
        merged=entry.merged - tokens,
        discarded=entry.discarded + tokens,
    )


_STANDING: Final[dict[str, Callable[[Any], Any]]] = dict.fromkeys(
    ("rank", "attempt", "round", "position"), wire.count
)
_ENTRY: Final[dict[str, Callable[[Any], Any]]] = dict.fromkeys(
    ("rank", "attempt", "life", "processed", "merged", "discarded"), wire.count
)


def standings(values: Any) -> Sequence[Standing]:
    """Standings from JSON values."""
    return wire.many(lambda one: Standing(**wire.fields(one, _STANDING)))(values)


def ledger_entries(values: Any) -> Sequence[LedgerEntry]:
    """Ledger entries from JSON values."""
    return wire.many(lambda one: LedgerEntry(**wire.fields(one, _ENTRY)))(values)
