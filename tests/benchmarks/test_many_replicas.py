"""Many replicas in one process: they agree, and ask of the store what was planned."""

from __future__ import annotations

import benchmark_modules  # noqa: F401  (makes the next imports possible)
import pytest
import torch
from many_replicas import BILLED, page, per_replica_hour, planned_requests
from simulated_fleet import Case, Found, simulate, slow_mean, slower_clock

from diloco_cloud.store.prices import LISTED

CASES = {
    "sharded": Case("raw", "sharded", 32),
    "volunteers": Case("raw", "reducers", 16, 2),
    "all-gather": Case("sparse", "all-gather", 1),
    "all-gather on its way": Case("raw", "all-gather", 16),
}


@pytest.fixture(scope="module")
def found() -> dict[str, Found]:
    """Each case with 32 replicas, which themselves check that all have the mean."""
    return {name: simulate(case, 32, numel=8 * 1024, rounds=1) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_many_replicas_ask_for_what_is_planned(found: dict[str, Found], name: str) -> None:
    one = found[name]
    # Once more for whoever decides; nothing is read twice.
    spare = {"PUT": 2, "GET": 0}
    for kind, more in spare.items():
        measured, planned = one.most(*BILLED[kind]), planned_requests(one, kind)
        assert planned - 2 <= measured <= planned + more, kind
    assert one.error < 1e-5


def test_many_replicas_volunteers_spare_the_replicas_reading_contributions(
    found: dict[str, Found],
) -> None:
    one = found["volunteers"]
    received = max(usage.bytes_received for usage in one.usage)
    headers = 32 * 8192
    assert received < 2 * one.nbytes + headers
    assert sum(usage.bytes_received for usage in one.volunteers) > 32 * one.nbytes


def test_many_replicas_page_has_the_cost_of_a_round(found: dict[str, Found]) -> None:
    one = found["sharded"]
    s3 = LISTED["s3"]
    writes = sum(usage.requests["create"] for usage in one.usage)
    reads = sum(usage.requests[m] for usage in one.usage for m in ("get", "get_range", "head"))
    lists = sum(usage.requests["list"] + usage.requests["list_dirs"] for usage in one.usage)
    by_hand = (writes + lists) * 0.005 / 1000 + reads * 0.0004 / 1000
    assert one.dollars(s3) == pytest.approx(by_hand)
    assert per_replica_hour(one, s3) == pytest.approx(6 * by_hand / 32)
    text = page(list(found.items()))
    assert f"| 32 | sharded | {by_hand:.4f} |" in text
    assert f"| {one.most('create')} ({planned_requests(one, 'PUT')}) |" in text


def test_slow_mean_is_over_all_or_those_that_sent_a_coordinate() -> None:
    sent = [torch.tensor([1.0, 0.0, 0.0]), torch.tensor([3.0, 5.0, 0.0])]
    assert slow_mean(sent).tolist() == [2.0, 2.5, 0.0]
    assert slow_mean(sent, of_senders=True).tolist() == [2.0, 5.0, 0.0]


def test_slower_clock_goes_by_the_wall() -> None:
    clock = slower_clock(0.001)
    before = clock.now()
    clock.sleep(10.0)
    assert clock.now() - before >= 10.0
