"""What must never be, and a line for each time that it was."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from diloco_cloud.chaos.chronicle import Entry
from diloco_cloud.chaos.evidence import Evidence, is_committed, recoveries, states
from diloco_cloud.exchange.commit import DRIFTED, Commit


def violations(evidence: Evidence, entries: Sequence[Entry]) -> Iterator[str]:
    """Every rule that was broken.

    Args:
        evidence: of the run.
        entries: its decisions, oldest first.
    """
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
    if is_committed(before) and is_committed(commit) and before.base == commit.base:
        yield f"{here}: the round before it was not applied"
    if is_committed(before):
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

    for step, told in states(evidence).items():
        if len(set(told.values())) > 1:
            yield f"replicas had different parameters after outer step {step}"


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
