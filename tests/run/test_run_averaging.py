"""Liveness, participation and breadth: who is heard of, gets into rounds, and with how many."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from clocked_store import ClockedStore
from manual_clock import Clock
from replica_writer import ReplicaWriter
from scripted_executor import ScriptedExecutor

from diloco_cloud import keys
from diloco_cloud.run import Run
from diloco_cloud.run.averaging import Averaging, summarize
from diloco_cloud.store.base import ObjectStore

MakeRun = Callable[..., Run]


def _commit(round_: int, *ranks: int, decision: str = "commit", **more: object) -> dict[str, Any]:
    lives = [{"rank": rank, "attempt": 0} for rank in ranks]
    return {"round": round_, "decision": decision, "contributors": lives, **more}


def _write(store: ObjectStore, commit: dict[str, Any]) -> None:
    store.create(keys.commit(commit["round"], 0), json.dumps(commit).encode())


def test_summarize_counts_committed_rounds_only() -> None:
    found = summarize(
        [_commit(0, 0, 1, 2), _commit(1, decision="discard"), _commit(2, 0), _commit(3, 0, 1)]
    )
    assert (found.rounds, found.breadth) == (3, 2.0)
    assert found.participation == {0: 1.0, 1: 2 / 3, 2: 1 / 3}
    assert found.oldest == 0
    assert summarize([]) == Averaging()
    assert summarize([_commit(0, decision="discard")]).breadth is None


def test_summarize_keeps_the_newest_exclusion_of_each_rank() -> None:
    first = _commit(0, 0, excluded=[{"rank": 1, "attempt": 0, "reason": "late"}])
    second = _commit(1, 0, excluded=[{"rank": 1, "attempt": 2, "reason": "NaN"}])
    third = _commit(2, 0, excluded=[{"rank": 3, "attempt": 0, "reason": "outlier"}])
    assert list(summarize([first, second, third]).excluded) == [
        {"rank": 3, "attempt": 0, "round": 2, "reason": "outlier"},
        {"rank": 1, "attempt": 2, "round": 1, "reason": "NaN"},
    ]


def test_summarize_survives_commits_of_another_version() -> None:
    odd = {"decision": "commit", "contributors": [7, {"rank": "x"}, {"rank": 1}], "excluded": "no"}
    odd |= {"round": "first", "standings": [{"rank": 1}], "ledger": [{"rank": 1, "merged": None}]}
    found = summarize([{}, odd])
    assert (found.rounds, found.breadth, found.participation) == (1, 1.0, {1: 1.0})
    assert (found.standings, found.merged, found.oldest) == ({}, {}, None)


def test_status_reports_liveness_participation_and_breadth_apart(
    make_clocked: MakeRun, clock: Clock, scripted: ScriptedExecutor
) -> None:
    run = make_clocked(replicas=4, heartbeat=1.0)
    for rank in range(3):
        ReplicaWriter(run.store, rank).beat()
    ledger = [{"rank": 0, "merged": 1200, "processed": 1200}]
    _write(run.store, _commit(7, 0, 1, 2, 3))
    _write(run.store, _commit(8, 0, 1))
    _write(run.store, _commit(9, 0, 1, 2, ledger=ledger))
    run.status()
    clock.now += 11
    ReplicaWriter(run.store, 0).beat()
    clock.now += 2  # thirteen beats since 1 and 2 were heard
    status = run.status()
    assert status.alive == (0,)
    assert [view.alive for view in status.replicas] == [True, False, False, False]
    assert [view.participation for view in status.replicas] == [1.0, 1.0, 2 / 3, 1 / 3]
    assert (status.breadth, status.rounds_kept) == (3.0, 3)
    assert [view.merged for view in status.replicas] == [1200, None, None, None]
    assert status.to_json()["breadth"] == 3.0
    assert json.loads(json.dumps(status.to_json()))["replicas"][2]["participation"] == 2 / 3


def test_status_before_the_first_round_has_no_breadth(make_clocked: MakeRun) -> None:
    status = make_clocked().status()
    assert (status.breadth, status.rounds_kept) == (None, 0)
    assert [view.participation for view in status.replicas] == [None, None]


def test_status_reads_each_commit_once_and_forgets_what_was_deleted(make_clocked: MakeRun) -> None:
    run = make_clocked()
    assert isinstance(run.store, ClockedStore)
    for round_ in range(3):
        _write(run.store, _commit(round_, 0, 1))
    run.store.create(keys.put(3, 0, 0, 0), b"open")
    run.status()
    run.store.reads.clear()
    run.status()
    assert [key for key in run.store.reads if key.startswith(keys.ROUNDS)] == [keys.commit(3, 0)]
    _write(run.store, _commit(3, 0))
    run.store.delete(keys.commit(0, 0))
    status = run.status()
    assert (status.rounds_kept, status.breadth) == (3, 5 / 3)
    run.store.reads.clear()
    run.status()
    assert [key for key in run.store.reads if key.startswith(keys.ROUNDS)] == []


def test_status_of_a_run_that_goes_on_costs_few_requests(
    make_clocked: MakeRun, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_clocked(replicas=4)
    assert isinstance(run.store, ClockedStore)
    for rank in range(4):
        ReplicaWriter(run.store, rank).beat()
    for round_ in range(8):
        _write(run.store, _commit(round_, 0, 1, 2, 3))
    run.status()
    listings: list[str] = []
    listing = run.store.list
    monkeypatch.setattr(run.store, "list", lambda p="": listings.append(p) or listing(p))
    run.store.reads.clear()
    run.status()
    assert sorted(run.store.reads) == [keys.alive(rank) for rank in range(4)]
    assert sorted(listings) == [keys.ALIVE, keys.REPLICAS]  # and the names of the rounds


def test_status_asks_no_more_for_a_round_that_was_deleted_half(make_clocked: MakeRun) -> None:
    run = make_clocked()
    assert isinstance(run.store, ClockedStore)
    run.store.create(keys.put(0, 0, 0, 0), b"what is left of it")
    _write(run.store, _commit(1, 0, 1))
    run.status()
    run.store.reads.clear()
    run.status()
    assert [key for key in run.store.reads if key.startswith(keys.ROUNDS)] == []
