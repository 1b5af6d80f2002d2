"""What a run leaves behind for its referee."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from diloco_cloud.chaos.chronicle import Entry
from diloco_cloud.chaos.storm import Injection
from diloco_cloud.exchange.commit import Commit

#: From when to when, in seconds since the epoch by the store's clock.
Window: TypeAlias = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a run left behind.

    Attributes:
        entries: its decisions, by round.
        changed: rounds whose decision was changed afterwards.
        injections: the faults it met.
        metrics: figures of rounds, as replicas reported them.
        outcomes: the last words of replicas.
        manifest: of the exported result.
        state: that the run ended in.
    """

    entries: Mapping[int, Entry]
    changed: frozenset[int] = frozenset()
    injections: Sequence[Injection] = ()
    metrics: Sequence[Mapping[str, Any]] = ()
    outcomes: Sequence[Mapping[str, Any] | None] = ()
    manifest: Mapping[str, Any] | None = None
    state: str = "succeeded"


@dataclass(frozen=True)
class Recovery:
    """What became of a killed replica.

    Attributes:
        survivors_s: seconds until the others committed the next round.
        back_s: seconds until a new life of it was in one; None: never.
    """

    rank: int
    attempt: int
    survivors_s: float | None
    back_s: float | None


def is_committed(commit: Commit) -> bool:
    """Whether a decision put work into the global parameters."""
    return commit.decision == "commit"


def recoveries(injections: Sequence[Injection], entries: Sequence[Entry]) -> Iterator[Recovery]:
    """What became of each killed replica.

    Args:
        injections: of any faults.
        entries: decisions, oldest first.
    """
    for one in injections:
        if one.fault.kind != "kill" or one.attempt is None:
            continue
        rank, attempt = one.fault.rank, one.attempt
        later = [e for e in entries if e.time > one.time and is_committed(e.commit)]
        back = next((e.time for e in later if _has_newer_life(e.commit, rank, attempt)), None)
        yield Recovery(
            rank,
            attempt,
            later[0].time - one.time if later else None,
            None if back is None else back - one.time,
        )


def _has_newer_life(commit: Commit, rank: int, attempt: int) -> bool:
    return any(one.rank == rank and one.attempt > attempt for one in commit.contributors)


def states(evidence: Evidence) -> Mapping[int, Mapping[tuple[int, int], float]]:
    """By outer step and life: the digest of the parameters after it, as its metrics tell."""
    found: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)
    for seen in evidence.metrics:
        if "val_state" in seen:
            found[int(seen["val_step"])][seen["rank"], seen["attempt"]] = seen["val_state"]
    return found
