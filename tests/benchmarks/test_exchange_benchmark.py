"""What the exchange is measured with: the references, the limits' bytes, a small measurement."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import benchmark_modules  # noqa: F401  (makes the next imports possible)
import exchange_tensors
import pytest
import torch
from bulk_transfer import BulkTransfer
from exchange_cell import MIB, Cell, CellMeasurement, Scope
from exchange_contenders import limit, ours
from exchange_fleet import FleetError, run_rounds
from exchange_replica import Job
from exchange_report import failures, page
from exchange_results import Result, SlowMean
from exchange_stores import Place, directory
from exchange_tensors import model_shape
from reference_exchange import REFERENCES, Reference

from diloco_cloud.store.memory import MemoryStore
from diloco_cloud.store.metered import MeteredStore

SIZES = [1000, 7, 30_011]


def test_model_shape_has_the_bytes_asked_for_in_unequal_tensors() -> None:
    sizes = model_shape(64 * MIB)
    assert 4 * sum(sizes) == 64 * MIB
    assert len(sizes) > 90
    assert min(sizes) > 0
    assert max(sizes) > 100 * min(sizes)


def test_contributions_differ_by_rank_round_and_place() -> None:
    def of(rank: int, round_: int) -> list[torch.Tensor]:
        tensors = exchange_tensors.empty(SIZES)
        exchange_tensors.fill(tensors, rank, round_)
        return tensors

    digests = {exchange_tensors.digest(of(rank, round_)) for rank in (0, 1) for round_ in (0, 1)}
    assert len(digests) == 4
    assert exchange_tensors.digest(of(0, 0)) in digests
    assert not torch.equal(of(0, 0)[0][:7], of(0, 0)[1])


@pytest.mark.parametrize("name", REFERENCES)
def test_references_end_with_the_slow_mean_on_every_replica(name: str) -> None:
    store = MeteredStore(MemoryStore(f"references-{name}"))

    def replica(rank: int) -> list[torch.Tensor]:
        tensors = exchange_tensors.empty(SIZES)
        exchange_tensors.fill(tensors, rank, 1)
        reference: Reference = REFERENCES[name](store, rank, 3)
        reference._poll_s = 0.001
        reference.allreduce(tensors)
        return tensors

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(replica, range(3)))
    expected = exchange_tensors.digest(exchange_tensors.slow_mean(SIZES, 3, 1))
    assert [exchange_tensors.digest(tensors) for tensors in found] == [expected] * 3
    assert exchange_tensors.relative_error(found[0], 3, 1) == 0
    objects = 1 if name != "reference" else len(SIZES)
    assert store.usage.requests["put"] == 3 * objects


def test_bulk_transfer_moves_the_bytes_of_its_limit_and_no_more() -> None:
    store = MeteredStore(MemoryStore("bulk"))
    up, down = 20 * MIB + 5, 41 * MIB + 3
    source = memoryview(bytearray(9 * MIB))
    transfers = [BulkTransfer(store, rank, 2, up, down, source) for rank in (0, 1)]
    for transfer in transfers:
        transfer.prepare()
    before = store.usage
    transfers[0].round(1)
    moved = store.usage - before
    assert (moved.bytes_sent, moved.bytes_received) == (up, down)


def test_limits_are_what_a_mode_cannot_do_without(measured_result: Result) -> None:
    moved = replace(measured_result, sent=11, received=12)

    def moves(reduction: str, codec: str = "fp32", reducers: int = 0) -> tuple[int, int]:
        found = limit(ours(reduction, codec, reducers), 800, 4, moved)
        return found.up, found.down

    assert moves("all-gather") == (800, 2400)
    assert moves("sharded") == (1000, 1200)
    assert moves("sharded", reducers=2) == (800, 800)
    assert moves("auto", "int8") == (11, 12)


@pytest.fixture(scope="module", autouse=True)
def _no_fork_server_left() -> Iterator[None]:
    yield
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def results() -> list[Result]:
    """A measurement of two real replicas over a directory."""
    scope = Scope(
        modes=("all-gather",),
        codecs=(),
        reducers=(),
        references=("reference-fast",),
        rounds=2,
        reference_rounds=1,
        layers=1,
    )
    with directory(2) as place:
        return list(CellMeasurement(Cell.parse("2x2"), place, scope, SlowMean()).results())


@pytest.fixture
def measured_result(results: list[Result]) -> Result:
    return next(one for one in results if one.kind == "ours")


def test_measurement_finds_the_bytes_the_rounds_and_the_mean(results: list[Result]) -> None:
    bound, mine, reference = results
    assert [one.kind for one in results] == ["limit", "ours", "reference"]
    assert (bound.sent, bound.received) == (2 * MIB, 2 * MIB)
    assert (mine.agree, mine.exact, reference.exact) == (True, True, True)
    assert len(mine.rounds_s) == 2
    assert mine.limit_s == bound.seconds > 0
    assert 2 * MIB <= mine.sent < 2.1 * MIB
    assert reference.received == 2 * MIB
    assert mine.replica_cpu_s > 0
    assert mine.error == 0


def test_report_tells_every_contender_and_what_went_wrong(results: list[Result]) -> None:
    text = page(results, 2, 1)
    assert all(one.name in text for one in results)
    assert not failures(results)
    wrong = replace(results[1], agree=False, exact=False)
    assert failures([results[0], wrong]) == [
        "directory, N = 2, S = 2 MiB: all-gather fp32: **DIFFER**"
    ]


def test_fleet_says_what_went_wrong_in_a_replica(tmp_path: Path) -> None:
    contender = replace(
        ours("all-gather", "fp32"), options={"reduction": "all-gather", "rank": "x"}
    )
    job = Job(contender, str(tmp_path), ({}, {}), {}, (100,), rounds=1, threads=1)
    with pytest.raises(FleetError, match="multiple values for argument 'rank'"):
        run_rounds(job, Place("directory", str(tmp_path), ({}, {})), lambda _round: None)


def test_fleet_notices_that_a_replica_was_killed(tmp_path: Path) -> None:
    contender = ours("all-gather", "fp32")
    job = Job(contender, str(tmp_path), ({}, {}), {}, (100,), rounds=1, threads=1)

    def kill_one(_round: int) -> None:
        os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)

    with pytest.raises(FleetError, match=r"replicas \[\d\] died"):
        run_rounds(job, Place("directory", str(tmp_path), ({}, {})), kill_one)
