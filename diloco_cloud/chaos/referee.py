"""Judges a run by what it left behind, with no word of its replicas taken on trust.

The decisions are the one thing that the referee saw by itself, in the chronicle. Everything is
checked against them: the ledger against the contributions, each replica's figures of a round
against its decision, the final parameters against one another.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from diloco_cloud.chaos.chronicle import Entry
from diloco_cloud.chaos.storm import Injection
from diloco_cloud.exchange.commit import DRIFTED, Commit

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
    inside = [e.commit for e in entries if start <= e.time <= end and _is_committed(e.commit)]
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
        states=sum(len(told) > 1 for told in _states(evidence).values()),
        violations=tuple(_violations(evidence, entries)),
    )


# -- measuring -------------------------------------------------------------------------------------


def _progress(entries: Sequence[Entry], worth: Callable[[Commit], float], window: Window) -> float:
    """What was committed in a window, where the rounds at its edges count by their part in it."""
    total = 0.0
    for before, after in itertools.pairwise(entries):
        start, end = max(before.time, window[0]), min(after.time, window[1])
        if _is_committed(after.commit) and after.time > before.time:
            part = max(0.0, end - start) / (after.time - before.time)
            total += part * worth(after.commit)
    return total


def _tokens_of(rank: int) -> Callable[[Commit], float]:
    return lambda commit: sum(one.tokens for one in commit.contributors if one.rank == rank)


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
        later = [e for e in entries if e.time > one.time and _is_committed(e.commit)]
        back = next((e.time for e in later if _has_newer_life(e.commit, rank, attempt)), None)
        yield Recovery(
            rank,
            attempt,
            later[0].time - one.time if later else None,
            None if back is None else back - one.time,
        )


def _has_newer_life(commit: Commit, rank: int, attempt: int) -> bool:
    return any(one.rank == rank and one.attempt > attempt for one in commit.contributors)


def _is_committed(commit: Commit) -> bool:
    return commit.decision == "commit"


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


# -- what must never be ----------------------------------------------------------------------------


def _violations(evidence: Evidence, entries: Sequence[Entry]) -> Iterator[str]:
    if evidence.state != "succeeded":
        yield f"the run ended as {evidence.state}"
    for round_ in sorted(evidence.changed):
        yield f"round {round_} was decided twice"
    for one in recoveries(evidence.injections, entries):
        if one.back_s is None:
            yield f"replica {one.rank} was killed (attempt {one.attempt}) and never came back"
    yield from _gaps(entries)
    for before, after in itertools.pairwise([None, *(e.commit for e in entries)]):
        assert after is not None
        yield from _misfits(before, after)
    yield from _contradictions(evidence)
    yield from _final_differences(evidence)


def _gaps(entries: Sequence[Entry]) -> Iterator[str]:
    if not entries:
        yield "no round was decided"
    rounds = {entry.commit.round for entry in entries}
    for round_ in sorted(set(range(max(rounds, default=-1) + 1)) - rounds):
        yield f"the decision of round {round_} was never seen"


def _misfits(before: Commit | None, commit: Commit) -> Iterator[str]:
    """How a decision contradicts itself or the one before it."""
    here = f"round {commit.round}"
    for excluded in commit.excluded:
        if excluded.reason == DRIFTED:
            yield f"{here}: replica {excluded.rank}'s parameters were not the others'"
    ledger = {entry.rank: entry for entry in commit.ledger}
    for entry in commit.ledger:
        if entry.balance:
            yield f"{here}: {entry.balance} tokens of replica {entry.rank} have no fate"
    if before is None or before.fragment != commit.fragment or before.round + 1 != commit.round:
        return
    lives = {one.rank: one.attempt for one in commit.standings}
    for one in before.standings:
        if lives.get(one.rank, -1) < one.attempt:
            yield f"{here}: an earlier life of replica {one.rank} was heard again"
    if _is_committed(before) and _is_committed(commit) and before.base == commit.base:
        yield f"{here}: the round before it was not applied"
    if _is_committed(before):
        past = {entry.rank: entry.merged for entry in before.ledger}
        tokens = {one.rank: one.tokens for one in commit.contributors}
        for rank, entry in ledger.items():
            if entry.merged != past.get(rank, 0) + tokens.get(rank, 0):
                yield f"{here}: replica {rank}'s merged tokens are not its contributions'"


def _contradictions(evidence: Evidence) -> Iterator[str]:
    """Where a replica saw another round than was decided."""
    for seen in evidence.metrics:
        entry = evidence.entries.get(seen["round"])
        if entry is None:
            yield f"a replica was in round {seen['round']}, which nobody decided"
            continue
        commit = entry.commit
        decided = (commit.base, commit.decision, len(commit.contributors))
        if seen["decision"] == "commit" and decided != (
            seen["base"],
            seen["decision"],
            seen["participants"],
        ):
            yield f"a replica saw another round {commit.round} than was decided"

    for step, told in _states(evidence).items():
        if len(set(told.values())) > 1:
            yield f"replicas had different parameters after outer step {step}"


def _states(evidence: Evidence) -> Mapping[int, Mapping[tuple[int, int], float]]:
    """By outer step and life: the digest of the parameters after it, as its metrics tell."""
    states: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)
    for seen in evidence.metrics:
        if "val_state" in seen:
            states[int(seen["val_step"])][seen["rank"], seen["attempt"]] = seen["val_state"]
    return states


def _final_differences(evidence: Evidence) -> Iterator[str]:
    ended = [one for one in evidence.outcomes if one is not None and one["state"] == "succeeded"]
    last = max((one["round"] for one in ended), default=None)
    digests = {one["digest"] for one in ended if one["round"] == last}
    if len(digests) > 1:
        yield f"replicas ended round {last} with {len(digests)} different parameters"
    manifest = evidence.manifest
    if manifest is not None and manifest.get("round") == last:
        digests.add(manifest["digest"])
        if len(digests) > 1:
            yield "the result is not what the replicas ended with"
    elif evidence.state == "succeeded":
        yield "there is no result of the last round"
