"""Who was averaged with whom: what the commits that are still kept say.

Commits are immutable, so each is read once. They are read as JSON, leniently: this is a report for
people and for the supervisor, and a commit of another version must not end it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from diloco_cloud import keys
from diloco_cloud.run.lives import Life
from diloco_cloud.run.record import read_json
from diloco_cloud.store.base import ObjectStore

#: At most so many of the newest rounds are looked at.
_WINDOW = 32
_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """What the kept rounds say.

    Attributes:
        rounds: committed rounds that were looked at.
        breadth: replicas averaged in each of them, on average; None without such a round.
        participation: by rank, the share of them it was in.
        contributors: lives that were in one of them.
        standings: by rank, the newest life that was ever in a round, and that round.
        merged: by rank, tokens whose work is in the global parameters.
        excluded: the newest exclusion of each rank, newest first: rank, attempt, round, reason.
        oldest: number of the oldest of the rounds.
        newest: the newest commit of all, whatever its decision.
    """

    rounds: int = 0
    breadth: float | None = None
    participation: Mapping[int, float] = field(default_factory=dict)
    contributors: frozenset[Life] = frozenset()
    standings: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    merged: Mapping[int, int] = field(default_factory=dict)
    excluded: tuple[Mapping[str, Any], ...] = ()
    oldest: int | None = None
    newest: Mapping[str, Any] | None = None

    def share(self, rank: int) -> float | None:
        """The share of the rounds that a rank was in; None without any round."""
        return self.participation.get(rank, 0.0) if self.rounds else None

    def progressed(self, rank: int, attempt: int) -> bool:
        """Whether this life, the newest of its rank, got into a committed round.

        For rounds that are no longer kept, having been looked at in one has to do.
        """
        if (rank, attempt) in self.contributors:
            return True
        last_attempt, last_round = self.standings.get(rank, (-1, -1))
        return last_attempt == attempt and self.oldest is not None and last_round < self.oldest


class CommitReader:
    """Reads the commits of one run, again and again.

    Args:
        store: the run's own prefix.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._known: dict[str, dict[str, Any] | None] = {}

    def read(self) -> Averaging:
        """One listing, and one read per commit that is new."""
        listed = self._store.list_dirs(keys.ROUNDS)
        rounds = [n for n in listed if keys.round_of(n) is not None and not keys.is_stream(n)]
        names = rounds[-_WINDOW:]
        self._known = {name: self._known[name] for name in names if name in self._known}
        unknown = [name for name in names if name not in self._known]
        if unknown:
            with ThreadPoolExecutor(_WORKERS, thread_name_prefix="commits") as pool:
                found = dict(zip(unknown, pool.map(self._commit, unknown), strict=True))
            self._known |= {name: commit for name, commit in found.items() if commit is not None}
            # A round without a commit may get one, unless a later one has: it was deleted then.
            last = max((name for name, commit in self._known.items() if commit), default="")
            self._known |= {
                name: None for name in unknown if name not in self._known and name < last
            }
        return summarize([c for name in names if (c := self._known.get(name)) is not None])

    def _commit(self, name: str) -> dict[str, Any] | None:
        return read_json(self._store, f"{keys.ROUNDS}{name}/commit")


def summarize(commits: Sequence[Mapping[str, Any]]) -> Averaging:
    """What commits say, taken together.

    Args:
        commits: oldest first.
    """
    if not commits:
        return Averaging()
    committed = [commit for commit in commits if commit.get("decision") == "commit"]
    ranks = [{rank for rank, _ in _lives(commit)} for commit in committed]
    newest = commits[-1]
    return Averaging(
        rounds=len(committed),
        breadth=sum(map(len, ranks)) / len(ranks) if ranks else None,
        participation={
            rank: sum(rank in there for there in ranks) / len(ranks)
            for rank in sorted(set().union(*ranks))
        },
        contributors=frozenset(life for commit in committed for life in _lives(commit)),
        standings={
            one["rank"]: (one["attempt"], one["round"])
            for one in _entries(newest, "standings", "rank", "attempt", "round")
        },
        merged={one["rank"]: one["merged"] for one in _entries(newest, "ledger", "rank", "merged")},
        excluded=_exclusions(commits),
        oldest=min(
            (c["round"] for c in committed if isinstance(c.get("round"), int)), default=None
        ),
        newest=newest,
    )


def _lives(commit: Mapping[str, Any]) -> Iterator[Life]:
    for one in _entries(commit, "contributors", "rank"):
        yield one["rank"], one.get("attempt", 0)


def _exclusions(commits: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    found: dict[int, Mapping[str, Any]] = {}
    for commit in reversed(commits):
        for one in _entries(commit, "excluded", "rank"):
            found.setdefault(
                one["rank"],
                {
                    "rank": one["rank"],
                    "attempt": one.get("attempt", 0),
                    "round": commit.get("round"),
                    "reason": one.get("reason"),
                },
            )
    return tuple(found.values())


def _entries(commit: Mapping[str, Any], key: str, *numbers: str) -> Iterator[Mapping[str, Any]]:
    """The objects in a list of a commit that have all of these numbers."""
    for one in commit.get(key) or ():
        if isinstance(one, dict) and all(isinstance(one.get(name), int) for name in numbers):
            yield one
