"""Schedules of faults, and what becomes of them."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from pathlib import Path

import pytest
from test_warm_executor import PATIENCE, is_gone, start, wait_until

from diloco_cloud.chaos.records import WarmReplica
from diloco_cloud.chaos.storm import Fault, Storm, poisson_storm, renewal_kills
from diloco_cloud.chaos.warm import WarmProcessExecutor


def test_a_seed_makes_a_storm() -> None:
    settings = {"replicas": 32, "seconds": 180.0, "per_hour": 90.0, "scale": 10.0}
    storm = poisson_storm(seed=3, **settings)  # type: ignore[arg-type]
    assert storm == poisson_storm(seed=3, **settings)  # type: ignore[arg-type]
    assert storm != poisson_storm(seed=4, **settings)  # type: ignore[arg-type]


def test_a_storm_has_the_faults_it_was_asked_for() -> None:
    hours = 100
    storm = poisson_storm(seed=0, replicas=32, seconds=3600.0 * hours, per_hour=90)
    kinds = Counter(fault.kind for fault in storm)
    assert len(storm) == pytest.approx(90 * hours, rel=0.05)
    assert kinds["kill"] / len(storm) == pytest.approx(28 / 45, rel=0.05)
    assert {fault.rank for fault in storm} == set(range(32))
    assert all(10 <= fault.seconds <= 30 for fault in storm if fault.kind == "stop")
    assert all(15 <= fault.seconds <= 40 for fault in storm if fault.kind == "partition")


def test_scale_makes_faults_denser_and_shorter() -> None:
    storm = poisson_storm(seed=0, replicas=32, seconds=3600.0, per_hour=90, scale=10)
    assert len(storm) == pytest.approx(900, rel=0.1)
    assert max(fault.seconds for fault in storm) <= 4


def test_kills_of_a_rank_keep_their_distance() -> None:
    kills = renewal_kills(seed=1, replicas=8, seconds=10_000, mean_s=14.6, least_s=2)
    assert len(kills) == pytest.approx(8 * 10_000 / 14.6, rel=0.05)
    assert kills == tuple(sorted(kills, key=lambda kill: kill.at))
    for rank in range(8):
        times = [kill.at for kill in kills if kill.rank == rank]
        assert min(b - a for a, b in itertools.pairwise(times)) >= 2


def test_a_storm_hits_real_processes(tmp_path: Path) -> None:
    partitions = tmp_path / "partitions"
    with WarmProcessExecutor(tmp_path / "state", preload=()) as executor:
        handle = start(executor, "sleep", ready=str(tmp_path / "ready"))
        wait_until((tmp_path / "ready").exists)
        replica = WarmReplica.of(handle)
        assert replica is not None
        seen: list[tuple[str, bool]] = []

        def look(_fault: Fault) -> bool:
            state = Path(f"/proc/{replica.pid}/stat").read_text().rpartition(")")[2].split()[0]
            seen.append((state, (partitions / "0").exists()))
            return True

        schedule = [
            Fault(0.0, "partition", 0, 0.4),
            Fault(0.05, "partition", 0, 0.1),  # ends before the other one
            Fault(0.1, "stop", 0, 0.1),
            Fault(0.15, "stop", 1, 0.1),  # there is no such replica
            Fault(0.16, "kill", 0),
        ]
        storm = Storm(
            schedule,
            lambda rank: replica if rank == 0 else None,
            partitions,
            may_hit=look,
            patience_s=0.2,
        )
        storm.run(threading.Event(), seconds=0.8)
        wait_until(lambda: is_gone(replica.pid))
        assert executor.collect([handle], timeout=PATIENCE)[0]["exit_code"] == -9
    assert [one.fault.kind for one in storm.injected if one.attempt == 0] == [
        *("partition", "partition", "stop", "kill")
    ]
    assert [one.fault.rank for one in storm.injected if one.attempt is None] == [1]
    assert seen[-1] == ("T", True)
    assert os.listdir(partitions) == []
