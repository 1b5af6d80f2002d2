"""The referee passes an honest history, and catches a forged one at each place it can be forged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from diloco_cloud.chaos.chronicle import Chronicle, Entry
from diloco_cloud.chaos.evidence import Evidence
from diloco_cloud.chaos.referee import judge
from diloco_cloud.chaos.storm import Fault, Injection
from diloco_cloud.exchange.commit import DRIFTED, Commit, Exclusion
from diloco_cloud.exchange.contribution import Header
from diloco_cloud.exchange.deciding import decide
from diloco_cloud.exchange.history import History
from diloco_cloud.store.memory import MemoryStore

REPLICAS, ROUNDS, TOKENS = 3, 6, 100
#: Replica 1 is killed when round 3 has begun, and back, as attempt 1, in round 4.
KILLED_AT, KILLED_RANK = 3.25, 1
WINDOW = (0.5, 4.5)


def honest_history() -> dict[int, Commit]:
    """One decision a second, as the product makes them."""
    history, commits = History(), {}
    for round_ in range(ROUNDS):
        headers = {}
        for rank in range(REPLICAS):
            if (rank, round_) == (KILLED_RANK, 3):
                continue
            attempt = int(rank == KILLED_RANK and round_ > 3)
            life_began = 4 if attempt else 0
            header = Header(
                kind="contribution",
                run="r",
                round=round_,
                fragment=0,
                rank=rank,
                attempt=attempt,
                base=f"state {round_}",
                layout="L",
                nbytes=4,
                tokens=TOKENS,
                processed=TOKENS * (round_ + 1 - life_began),
            )
            headers[rank] = (header, f"{round_}.{rank}")
        commit = decide(headers, run="r", round_=round_, fragment=0, before=history)
        history.note(commit, applied=True)
        commits[round_] = commit
    return commits


def metrics_of(commits: dict[int, Commit]) -> list[dict[str, Any]]:
    return [
        {
            "rank": one.rank,
            "attempt": one.attempt,
            "round": commit.round,
            "val_step": commit.round,
            "val_state": 7.0 * commit.round,
            "decision": commit.decision,
            "base": commit.base,
            "participants": len(commit.contributors),
        }
        for commit in commits.values()
        for one in commit.contributors
    ]


def evidence(commits: dict[int, Commit] | None = None, **changes: Any) -> Evidence:
    honest = honest_history()
    outcome = {"state": "succeeded", "round": ROUNDS, "digest": "final"}
    whole = Evidence(
        entries={
            round_: Entry(commit, float(round_ + 1))
            for round_, commit in (commits or honest).items()
        },
        injections=[Injection(Fault(0.0, "kill", KILLED_RANK), KILLED_AT, 0)],
        metrics=metrics_of(honest),
        outcomes=[outcome] * REPLICAS,
        manifest={"round": ROUNDS, "digest": "final"},
    )
    return replace(whole, **changes)


def test_an_honest_history_passes_and_is_measured() -> None:
    verdict = judge(evidence(), WINDOW)
    assert verdict.violations == ()
    assert verdict.seconds == 4
    # Commits at 1 … 6 s: of the window, half a second lies before the first.
    assert verdict.rounds == pytest.approx(3.5)
    assert verdict.tokens == pytest.approx(TOKENS * (3 + 3 + 2 + 0.5 * 3))
    assert (verdict.participation, verdict.fewest) == ((3 + 3 + 3 + 2) / 4, 2)
    assert verdict.faults == {"kill": 1}
    (recovery,) = verdict.recoveries
    assert (recovery.survivors_s, recovery.back_s) == (0.75, 1.75)
    assert (verdict.recovered, verdict.back_s, verdict.survivors_s) == (1, 1.75, 0.75)


def changed(round_: int, change: Callable[[Commit], Commit]) -> dict[int, Commit]:
    commits = honest_history()
    return {**commits, round_: change(commits[round_])}


def _first(values: tuple[Any, ...], **changes: Any) -> tuple[Any, ...]:
    return (replace(values[0], **changes), *values[1:])


FORGERIES: dict[str, tuple[int, Callable[[Commit], Commit], str]] = {
    "tokens of a contribution": (
        2,
        lambda c: replace(c, contributors=_first(c.contributors, tokens=TOKENS + 1)),
        "round 2: replica 0's merged tokens are not its contributions'",
    ),
    "a contributor less": (
        2,
        lambda c: replace(c, contributors=c.contributors[1:]),
        "round 2: replica 0's merged tokens are not its contributions'",
    ),
    "unbalanced ledger": (
        2,
        lambda c: replace(c, ledger=_first(c.ledger, processed=7)),
        "round 2: -293 tokens of replica 0 have no fate",
    ),
    "tokens merged twice": (
        2,
        lambda c: replace(c, ledger=_first(c.ledger, merged=4 * TOKENS, processed=4 * TOKENS)),
        "round 2: replica 0's merged tokens are not its contributions'",
    ),
    "another base": (
        2,
        lambda c: replace(c, base="elsewhere"),
        "a replica saw another round 2 than was decided",
    ),
    "a round that was not applied": (
        2,
        lambda c: replace(c, base="state 1"),
        "round 2: the round before it was not applied",
    ),
    "an earlier life": (
        5,
        lambda c: replace(
            c,
            standings=tuple(replace(one, attempt=0) for one in c.standings),
        ),
        "round 5: an earlier life of replica 1 was heard again",
    ),
    "drift": (
        5,
        lambda c: replace(c, excluded=(Exclusion(rank=2, attempt=0, reason=DRIFTED),)),
        "round 5: replica 2's parameters were not the others'",
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_decision_is_caught(forgery: str) -> None:
    round_, change, complaint = FORGERIES[forgery]
    assert complaint in judge(evidence(changed(round_, change)), WINDOW).violations


def test_other_parameters_in_mid_run_are_caught() -> None:
    honest = metrics_of(honest_history())
    assert judge(evidence(), WINDOW).states == ROUNDS
    forged = [*honest[:-1], {**honest[-1], "val_state": 1.0}]
    complaint = f"replicas had different parameters after outer step {ROUNDS - 1}"
    assert judge(evidence(metrics=forged), WINDOW).violations == (complaint,)


def test_a_missing_decision_is_caught() -> None:
    commits = honest_history()
    del commits[2]
    violations = judge(evidence(commits), WINDOW).violations
    assert "the decision of round 2 was never seen" in violations
    assert "a replica was in round 2, which nobody decided" in violations


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"state": "failed"}, "the run ended as failed"),
        ({"changed": frozenset({2})}, "round 2 was decided twice"),
        ({"entries": {}}, "no round was decided"),
        ({"manifest": None}, "there is no result of the last round"),
        (
            {"manifest": {"round": ROUNDS, "digest": "other"}},
            "the result is not what the replicas ended with",
        ),
        (
            {
                "outcomes": [
                    {"state": "succeeded", "round": ROUNDS, "digest": name} for name in "ab"
                ]
            },
            f"replicas ended round {ROUNDS} with 2 different parameters",
        ),
        (
            {"injections": [Injection(Fault(0.0, "kill", 0), KILLED_AT, 0)]},
            "replica 0 was killed (attempt 0) and never came back",
        ),
    ],
)
def test_what_must_never_be_is_caught(changes: dict[str, Any], complaint: str) -> None:
    assert complaint in judge(evidence(**changes), WINDOW).violations


def test_a_replica_that_ended_earlier_is_not_compared() -> None:
    last = {"state": "succeeded", "round": ROUNDS, "digest": "final"}
    early = {"state": "succeeded", "round": ROUNDS - 1, "digest": "another"}
    lost = {"state": "failed", "round": None, "digest": None}
    assert judge(evidence(outcomes=[early, last, lost, None]), WINDOW).violations == ()


def test_the_chronicle_keeps_what_is_deleted_and_notices_what_is_changed() -> None:
    store = MemoryStore("chronicle")
    chronicle = Chronicle(store)
    commits = honest_history()
    store.create("rounds/00000000.0/put/0000.0000", b"")
    chronicle.look()
    assert (chronicle.entries, chronicle.last) == ({}, -1)
    for round_, commit in commits.items():
        store.create(f"rounds/{round_:08d}.0/commit", commit.encode())
        chronicle.look()
        store.delete(f"rounds/{round_ - 1:08d}.0/commit")
    assert {r: entry.commit for r, entry in chronicle.entries.items()} == commits
    assert chronicle.is_back(KILLED_RANK, 0)
    assert not chronicle.is_back(KILLED_RANK, 1)
    assert chronicle.changed == set()
    forged = dataclasses.replace(commits[5], reason="forged")
    store.put("rounds/00000005.0/commit", forged.encode())
    chronicle.look()
    assert chronicle.changed == {5}
