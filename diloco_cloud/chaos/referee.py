"""Judges a run by what it left behind, with no word of its replicas taken on trust.

The decisions are the one thing that the referee saw by itself, in the chronicle. Everything is
checked against them: the ledger against the contributions, each replica's figures of a round
against its decision, the final parameters against one another.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from diloco_cloud.chaos.chronicle import Entry
from diloco_cloud.chaos.evidence import (
    Evidence,
    Recovery,
    Window,
    is_committed,
    recoveries,
    states,
)
from diloco_cloud.chaos.rules import violations
from diloco_cloud.exchange.commit import Commit


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Figures of the window, and what must never be and was.

    Attributes:
        seconds: length of the window.
        rounds: committed in it; a round that began before it or ended after it counts in part.
        participation: mean number of contributors of those rounds.
        fewest: contributors of the round that had fewest.
        tokens_by_rank: merged in it; of a round that began before it or ended after it in part.
        recoveries: of each kill.
        faults: injected in it, by kind.
        exclusions: contributions left out of a round, by reason.
        states: how often, in the whole run, two or more replicas told what parameters they had
            after the same outer step; they are to be the same.
        violations: one line for each.
    """

    seconds: float
    rounds: float
    participation: float
    fewest: int
    tokens_by_rank: Mapping[int, float] = field(default_factory=dict)
    recoveries: tuple[Recovery, ...] = ()
    faults: Mapping[str, int] = field(default_factory=dict)
    exclusions: Mapping[str, int] = field(default_factory=dict)
    states: int = 0
    violations: tuple[str, ...] = ()

    @property
    def rounds_per_s(self) -> float:
        return self.rounds / self.seconds

    @property
    def tokens(self) -> float:
        """Merged in the window, by all."""
        return sum(self.tokens_by_rank.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def recovered(self) -> int:
        """Kills after which the rank got into a round again."""
        return sum(one.back_s is not None for one in self.recoveries)

    @property
    def back_s(self) -> float | None:
        """Median seconds from a kill to the rank's next contribution in a committed round."""
        return _median(one.back_s for one in self.recoveries)

    @property
    def survivors_s(self) -> float | None:
        """Median seconds from a kill to the next committed round."""
        return _median(one.survivors_s for one in self.recoveries)


def judge(evidence: Evidence, window: Window) -> Verdict:
    """Measure a part of a run, and look for what must never be in all of it.

    Args:
        evidence: of the run.
        window: what is measured; kills in it may be recovered from later.
    """
    start, end = window
    entries = [evidence.entries[round_] for round_ in sorted(evidence.entries)]
    inside = [e.commit for e in entries if start <= e.time <= end and is_committed(e.commit)]
    breadths = [len(commit.contributors) for commit in inside]
    faults = [one for one in evidence.injections if start <= one.time <= end]
    ranks = sorted({one.rank for commit in inside for one in commit.contributors})
    return Verdict(
        seconds=end - start,
        rounds=_progress(entries, lambda _commit: 1.0, window),
        participation=statistics.fmean(breadths) if breadths else 0.0,
        fewest=min(breadths, default=0),
        tokens_by_rank={rank: _progress(entries, _tokens_of(rank), window) for rank in ranks},
        recoveries=tuple(recoveries(faults, entries)),
        faults=dict(Counter(x.fault.kind for x in faults if x.attempt is not None)),
        exclusions=dict(Counter(x.reason for e in entries for x in e.commit.excluded)),
        states=sum(len(told) > 1 for told in states(evidence).values()),
        violations=tuple(violations(evidence, entries)),
    )


def _progress(entries: Sequence[Entry], worth: Callable[[Commit], float], window: Window) -> float:
    """What was committed in a window, where the rounds at its edges count by their part in it."""
    total = 0.0
    for before, after in itertools.pairwise(entries):
        start, end = max(before.time, window[0]), min(after.time, window[1])
        if is_committed(after.commit) and after.time > before.time:
            part = max(0.0, end - start) / (after.time - before.time)
            total += part * worth(after.commit)
    return total


def _tokens_of(rank: int) -> Callable[[Commit], float]:
    return lambda commit: sum(one.tokens for one in commit.contributors if one.rank == rank)


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
