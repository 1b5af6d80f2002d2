"""The decision of a round, from headers alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from diloco_cloud.errors import CorruptContributionError
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.contribution import Header
from diloco_cloud.exchange.deciding import decide
from diloco_cloud.exchange.history import History


def header(rank: int, **changes: object) -> Header:
    plain = Header(
        kind="contribution",
        run="r",
        round=0,
        fragment=0,
        rank=rank,
        attempt=0,
        layout="L",
        nbytes=64 * 2**20,
        base="B",
        tokens=100,
        inner_steps=10,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def decision(*headers: Header, **settings: object) -> Commit:
    named = {h.rank: (h, f"digest{h.rank}") for h in headers}
    return decide(named, run="r", round_=4, fragment=0, **settings)  # type: ignore[arg-type]


def test_everyone_is_in_by_rank_with_token_weights() -> None:
    commit = decision(header(2), header(0, tokens=50), header(1))
    assert commit.decision == "commit"
    assert [c.rank for c in commit.contributors] == [0, 1, 2]
    assert commit.weights == [0.5, 1.0, 1.0]
    assert [c.header for c in commit.contributors] == ["digest0", "digest1", "digest2"]


def test_equal_weights_are_exactly_one() -> None:
    assert decision(header(0, tokens=7), header(1, tokens=7)).weights == [1.0, 1.0]


def test_without_token_counts_from_all_nobody_is_weighted() -> None:
    assert decision(header(0, tokens=0), header(1)).weights == [1.0, 1.0]


def test_other_tensors_abort_and_name_the_odd_one() -> None:
    commit = decision(header(0), header(1, layout="X"), header(2))
    assert commit.decision == "abort"
    assert "replica 1 trains tensors of other names" in commit.reason


def test_nan_is_left_out_and_the_rest_commit() -> None:
    commit = decision(header(0), header(1, finite=False))
    assert [c.rank for c in commit.contributors] == [0]
    assert [(e.rank, e.reason) for e in commit.excluded] == [(1, "has NaN or infinite values")]


def test_another_base_is_left_out_by_majority() -> None:
    commit = decision(header(0, base="drifted"), header(1), header(2))
    assert [c.rank for c in commit.contributors] == [1, 2]
    assert commit.base == "B"
    assert "other global parameters" in commit.excluded[0].reason


def test_nothing_usable_is_discarded_with_the_reasons() -> None:
    commit = decision(header(0, finite=False), header(1, finite=False))
    assert commit.decision == "discard"
    assert "replica 0: has NaN" in commit.reason
    assert "replica 1: has NaN" in commit.reason


def test_a_leave_is_remembered() -> None:
    commit = decision(header(0), leaving=[1], before=History(finished=(3,)))
    assert commit.finished == (1, 3)
    assert [c.rank for c in commit.contributors] == [0]


def test_a_tie_over_the_base_settles_nothing() -> None:
    commit = decision(header(0, base="A"), header(1, base="B"))
    assert commit.decision == "discard"
    assert [e.rank for e in commit.excluded] == [0, 1]


def test_everyones_position_is_kept_also_of_those_left_out() -> None:
    commit = decision(header(0, position=30), header(1, position=20, finite=False))
    assert [(one.rank, one.position) for one in commit.standings] == [(0, 30), (1, 20)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"codec": "zip"}, "encoded as 'zip'"), ({"chunk_bytes": 64}, "in chunks of 64 bytes")],
)
def test_what_cannot_be_read_is_left_out(change: dict[str, object], reason: str) -> None:
    commit = decision(header(0), header(1, **change))
    assert [c.rank for c in commit.contributors] == [0]
    assert reason in commit.excluded[0].reason


@pytest.mark.parametrize(
    ("ranks", "spread", "reducers", "plan", "shards"),
    [
        (3, 0, 0, "all-gather", 0),
        (3, 3, 0, "sharded", 3),
        (2, 3, 0, "sharded", 2),  # One did not come.
        (1, 3, 0, "all-gather", 0),
        (3, 5, 5, "sharded", 5),
        (1, 1, 1, "sharded", 1),
    ],
)
def test_plan_follows_from_how_contributions_were_sent(
    ranks: int, spread: int, reducers: int, plan: str, shards: int
) -> None:
    sent = {"nbytes": 64 * 2**20, "spread": spread, "reducers": reducers}
    commit = decision(*(header(r, **sent) for r in range(ranks)))
    assert (commit.plan, commit.shards, commit.reducers) == (plan, shards, reducers)
    assert Commit.decode(commit.encode()) == commit


def test_commit_round_trips() -> None:
    commit = decision(header(0), header(1, finite=False), before=History(finished=(5,)))
    assert Commit.decode(commit.encode()) == commit
    assert Commit.decode(commit.encode()).digest == commit.digest


GOOD = json.loads(decision(header(0), header(1)).encode())
CONTRIBUTOR = GOOD["contributors"][0]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b'{"round": 1}',
        b"[" * 100_000,
        *(
            json.dumps(GOOD | change).encode()
            for change in (
                {"contributors": 3},
                {"contributors": []},
                {"decision": "maybe"},
                {"chunk_bytes": 0},
                {"chunk_bytes": 12},
                {"chunk_bytes": "z"},
                {"plan": "sharded", "shards": 9},
                {"plan": "sharded", "shards": 0},
                {"nbytes": 10**400},
                {"round": -1},
                {"standings": [[1]]},
                {"contributors": [CONTRIBUTOR | {"weight": 0}]},
                {"contributors": [CONTRIBUTOR | {"weight": float("nan")}]},
                {"contributors": [CONTRIBUTOR | {"rank": True}]},
            )
        ),
    ],
)
def test_commit_refuses_what_is_not_one(data: bytes) -> None:
    with pytest.raises(CorruptContributionError):
        Commit.decode(data)
