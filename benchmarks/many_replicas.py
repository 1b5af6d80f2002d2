"""Hundreds of replicas in one process: do they agree, and what do their requests cost?

    python benchmarks/many_replicas.py [--replicas 8 32 128 256] [--rounds 2] [--jobs 2]

Counted is what each replica asks of the store (:mod:`simulated_fleet`), beside what the planner
predicts for a model of 256 MiB; and what that costs at the providers' list prices.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, Final

import measured
import torch
from simulated_fleet import SCALE, Case, Found, simulate

from diloco_cloud.store.prices import LISTED, Prices

#: Elements of what each contributes: SCALE times as many, in fp32, are 256 MiB.
NUMEL: Final = 32 * 1024
CASES: Final = {
    "fp32, sharded": Case("raw", "sharded", 128),
    "fp32, 8 volunteers": Case("raw", "reducers", 128, 8),
    "sparse, all-gather": Case("sparse", "all-gather", 1),
}
#: For the price of an hour.
ROUNDS_PER_HOUR: Final = 6
#: Calls of the store's protocol by what a bill calls them.
BILLED: Final = {
    "PUT": ("create", "put"),
    "GET": ("get", "get_range", "head"),
    "LIST": ("list", "list_dirs"),
}
#: Whoever publishes a price of requests.
PROVIDERS: Final = {name: prices for name, prices in LISTED.items() if prices.write > 0}


def planned_requests(found: Found, kind: str) -> int:
    """Requests of one kind that the planner expects of the replica with the most."""
    cost = found.case.predicted(found.replicas, SCALE * found.nbytes, LISTED["s3"])
    return sum(cost.requests.get(method, 0) for method in BILLED[kind])


def planned_dollars(found: Found, prices: Prices, *, near: bool = True) -> float:
    """Of a round, for all; with what is read from outside the provider's network if not near."""
    cost = found.case.predicted(found.replicas, SCALE * found.nbytes, prices, near=near)
    assert cost.dollars is not None
    return cost.dollars


def per_replica_hour(found: Found, prices: Prices) -> float:
    """Dollars of a replica's requests in an hour of :data:`ROUNDS_PER_HOUR` rounds."""
    return ROUNDS_PER_HOUR * found.dollars(prices) / found.replicas


# -- writing it down ---------------------------------------------------------------------------


def _kilobytes(found: Found) -> list[str]:
    payload = found.case.predicted(found.replicas, found.nbytes, LISTED["s3"])
    sent = max(usage.bytes_sent for usage in found.usage)
    received = max(usage.bytes_received for usage in found.usage)
    return [
        f"{sent / 1e3:.0f} ({payload.bytes_up / 1e3:.0f})",
        f"{received / 1e3:.0f} ({payload.bytes_down / 1e3:.0f})",
    ]


def request_row(name: str, found: Found) -> list[object]:
    """What a replica asked for: measured, and planned in brackets."""
    counts = [f"{found.most(*BILLED[kind])} ({planned_requests(found, kind)})" for kind in BILLED]
    return [
        found.replicas,
        name,
        found.rounds,
        *counts,
        *_kilobytes(found),
        f"{found.error:.0e}",
        f"{found.seconds:.0f}",
    ]


def cost_row(name: str, found: Found) -> list[object]:
    """What a round costs."""
    dollars = [f"{found.dollars(prices):.4f}" for prices in PROVIDERS.values()]
    s3 = LISTED["s3"]
    return [
        found.replicas,
        name,
        *dollars,
        f"{planned_dollars(found, s3):.4f}",
        f"{planned_dollars(found, s3, near=False):.2f}",
        f"{per_replica_hour(found, s3):.4f}",
    ]


def page(found: Sequence[tuple[str, Found]]) -> str:
    """The tables, and how to read them."""
    requests = measured.table(
        [
            *("replicas", "plan", "rounds", *BILLED, "kB sent", "kB received"),
            *("error", "seconds"),
        ],
        [request_row(name, one) for name, one in found],
    )
    costs = measured.table(
        [
            *("replicas", "plan", *(prices.provider for prices in PROVIDERS.values())),
            *("S3, planned", "S3, planned, read from elsewhere", "S3, per replica-hour"),
        ],
        [cost_row(name, one) for name, one in found],
    )
    nbytes = found[0][1].nbytes
    return f"""
Over one store in memory, all replicas of a row in one process. In every round all have read the
same decision and have the same bits, which are those of a mean in float64 but for rounding (error:
the largest, over the mean's root mean square).

## Requests of one replica in a round

Those of the replica that made the most of a kind, in the last round; in brackets what the planner
predicts for a model of {SCALE * nbytes / 2**20:.0f} MiB over 1 Gbit/s and 30 ms. Here it has
{nbytes / 2**10:.0f} KiB in as many chunks, which makes no difference to how many requests there
are; in the bytes, planned is the payload, and the rest are headers (2 kB and 28 bytes for each
chunk, of every peer) and the decision, which are no larger for a larger model. How often a replica
lists depends on how long it waits, which here is how long one machine takes for all, with whatever
else it is busy with; nothing else depends on that. Planned are the looks of a fleet on such links.

{requests}

## Dollars of a round, of all replicas

At list prices, for the requests that were counted, volunteers' included; reading in the bucket's
own region is free. Read from outside the provider's network, what is read is paid for, and is most
of the cost. An hour is one of {ROUNDS_PER_HOUR} rounds.

{costs}
"""


def _values(name: str, found: Found) -> dict[str, Any]:
    return {
        "plan": name,
        **vars(found.case),
        "replicas": found.replicas,
        "rounds": found.rounds,
        "nbytes": found.nbytes,
        "seconds": round(found.seconds, 1),
        "cpu_s": round(found.cpu_s, 1),
        "threads": found.threads,
        "error": found.error,
        "requests": {kind: found.most(*methods) for kind, methods in BILLED.items()},
        "planned_requests": {kind: planned_requests(found, kind) for kind in BILLED},
        "bytes_sent": max(usage.bytes_sent for usage in found.usage),
        "bytes_received": max(usage.bytes_received for usage in found.usage),
        "dollars": {key: found.dollars(prices) for key, prices in PROVIDERS.items()},
        "planned_dollars": {
            key: planned_dollars(found, prices) for key, prices in PROVIDERS.items()
        },
        "s3_dollars_per_replica_hour": per_replica_hour(found, LISTED["s3"]),
    }


def simulate_all(sizes: Sequence[int], rounds: int, jobs: int) -> list[tuple[str, Found]]:
    """Every case with so many replicas, by size.

    Args:
        sizes: how many replicas.
        rounds: of each case.
        jobs: cases at once, each in a process of its own: one takes little more than a core.
    """
    cells = [(replicas, name) for replicas in sizes for name in CASES]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, torch.set_num_threads, (1,)) as pool:
        under_way = {
            cell: pool.submit(simulate, CASES[cell[1]], cell[0], NUMEL, rounds)
            for cell in sorted(cells, reverse=True)  # The largest take longest.
        }
        for future in as_completed(under_way.values()):
            if future.exception() is not None:
                pool.shutdown(wait=False, cancel_futures=True)
            one = future.result()
            asked = ", ".join(f"{one.most(*methods)} {kind}" for kind, methods in BILLED.items())
            print(
                f"{one.replicas} replicas, {one.case.codec}, {one.case.kind}: {rounds} rounds in "
                f"{one.seconds:.0f} s, {asked}, S3 ${one.dollars(LISTED['s3']):.4f} per round",
                flush=True,
            )
        return [(name, under_way[replicas, name].result()) for replicas, name in cells]


def main() -> None:
    """Simulate every case, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 32, 128, 256])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    where = measured.machine()
    found = simulate_all(given.replicas, given.rounds, given.jobs)
    document = {"scale": SCALE, "cases": [_values(name, one) for name, one in found]}
    measured.write("many_replicas", "Many replicas", where, page(found), document)


if __name__ == "__main__":
    main()
