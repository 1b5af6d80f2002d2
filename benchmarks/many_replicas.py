"""Hundreds of replicas in one process: do they agree, and what would their requests cost?

    python benchmarks/many_replicas.py [--replicas 256]

All of a run's exchanges meet over one store in memory, each in threads of its own, so the seconds
say nothing of a fleet; what is counted is what each replica asks of the store. The mean is compared
with one that is added up replica by replica, and the requests with what the planner predicts.
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import measured
import torch

from diloco_cloud.exchange.codecs import get_codec
from diloco_cloud.exchange.following import sums_of
from diloco_cloud.exchange.prediction import Cost, Job, Kind, Plan, predict
from diloco_cloud.exchange.rounds import RoundExchange
from diloco_cloud.exchange.upload import PARALLEL_WRITES
from diloco_cloud.exchange.work import Work
from diloco_cloud.store.memory import MemoryStore
from diloco_cloud.store.metered import MeteredStore, Usage
from diloco_cloud.store.prices import LISTED, Prices

REPLICAS = 256
#: Small, so that the values of all replicas fit into memory; chunks are as small in proportion.
NUMEL = 256 * 1024
#: Never waited for: here all owners are slow, and none is gone.
_PATIENCE_S = 600.0


@dataclass(frozen=True)
class Case:
    """One way to exchange.

    Attributes:
        codec: by name.
        kind: of the plan.
        chunks: of one contribution.
    """

    codec: str
    kind: Kind
    chunks: int


CASES = (Case("raw", "sharded", 256), Case("sparse", "all-gather", 4))


@dataclass(frozen=True)
class Found:
    """What a round came to.

    Attributes:
        usage: of each replica, by rank.
        predicted: of the replica with the most, and dollars of all.
        seconds, cpu_s: of all replicas, in one process.
    """

    case: Case
    usage: Sequence[Usage]
    predicted: Cost
    seconds: float
    cpu_s: float

    def most(self, method: str) -> int:
        """Calls of a method by the replica that made the most."""
        return max(usage.requests[method] for usage in self.usage)

    def dollars(self, prices: Prices) -> float:
        """For the requests of all."""
        return prices.requests(sum((usage.requests for usage in self.usage), Counter()))


def values(rank: int, numel: int = NUMEL) -> torch.Tensor:
    """What a replica contributes: fp32, shape (numel,)."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def slow_mean(case: Case, contributions: Sequence[torch.Tensor], chunk: int) -> torch.Tensor:
    """Added up one replica after the other; of what is sent, over those that sent a coordinate.

    Args:
        case: how they are encoded.
        contributions: fp32, shape (numel,).
        chunk: elements that are encoded together.
    """
    total, senders = torch.zeros_like(contributions[0]), torch.zeros_like(contributions[0])
    for one in contributions:
        sent = one if case.codec == "raw" else _as_sent(case.codec, one, chunk)
        total += sent
        senders += 1 if case.codec == "raw" else sent != 0
    return total / senders.clamp(min=1)


def _as_sent(name: str, given: torch.Tensor, chunk: int) -> torch.Tensor:
    codec = get_codec(name)
    return torch.cat([codec.decode(codec.encode(part), len(part)) for part in given.split(chunk)])


def simulate(case: Case, replicas: int = REPLICAS, numel: int = NUMEL) -> Found:
    """Let so many replicas meet once, and compare what they got.

    Raises:
        AssertionError: they disagree, or have something else than the mean.
    """
    name, chunk = uuid.uuid4().hex, numel // case.chunks
    stores = [MeteredStore(MemoryStore(name)) for _ in range(replicas)]
    contributions = [values(rank, numel) for rank in range(replicas)]
    settings: dict[str, Any] = {
        "codec": case.codec,
        "reduction": case.kind,
        "chunk_bytes": 4 * chunk,
        "patience_s": _PATIENCE_S,
    }

    def meet(rank: int) -> tuple[str, torch.Tensor]:
        own = RoundExchange(stores[rank], "many", rank, replicas, **settings)
        result = own.exchange(0, 0, [contributions[rank]], Work(tokens=1))
        assert result.tensors is not None, result.reason
        return result.commit.digest, result.tensors[0]

    began, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(replicas) as pool:
        ends = list(pool.map(meet, range(replicas)))
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    assert len({digest for digest, _ in ends}) == 1
    assert all(torch.equal(mean, ends[0][1]) for _, mean in ends)
    expected = slow_mean(case, contributions, chunk)
    if case.codec == "raw":
        assert torch.equal(ends[0][1], expected)
    else:
        torch.testing.assert_close(ends[0][1], expected)
    return Found(case, [one.usage for one in stores], _predicted(case, replicas, numel), took, cpu)


def _predicted(case: Case, replicas: int, numel: int) -> Cost:
    plan = Plan(case.kind, 4 * numel // case.chunks, PARALLEL_WRITES)
    ratios = [
        1.0 if name == "raw" else 32 / get_codec(name).bits_per_parameter
        for name in (case.codec, sums_of(case.codec))
    ]
    job = Job(nbytes=4 * numel, contributors=replicas, put_ratio=ratios[0], sum_ratio=ratios[1])
    return predict(plan, job, (), LISTED["s3"], same_region=True)


# -- writing it down ---------------------------------------------------------------------------

_METHODS = ("create", "get_range", "get", "list")


def _row(found: Found) -> list[object]:
    case = found.case
    counts = [
        f"{found.most(method)} ({found.predicted.requests.get(method, 0)})" for method in _METHODS
    ]
    received = max(usage.bytes_received for usage in found.usage) / 1e6
    dollars = f"{found.dollars(LISTED['s3']):.4f} ({found.predicted.dollars:.4f})"
    name = "fp32" if case.codec == "raw" else case.codec
    return [name, case.kind, case.chunks, *counts, f"{received:.1f}", dollars]


def _values(found: Found) -> dict[str, Any]:
    return {
        **vars(found.case),
        "seconds": round(found.seconds, 1),
        "cpu_s": round(found.cpu_s, 1),
        "most": {method: found.most(method) for method in _METHODS},
        "predicted": dict(found.predicted.requests),
        "bytes_received": [usage.bytes_received for usage in found.usage],
        "dollars": found.dollars(LISTED["s3"]),
        "predicted_dollars": found.predicted.dollars,
    }


def main() -> None:
    """Simulate every case, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    replicas = parser.parse_args().replicas
    torch.set_num_threads(1)
    where = measured.machine()
    found = [simulate(case, replicas) for case in CASES]
    header = ["codec", "plan", "chunks", *_METHODS, "MB received", "S3 $ per round, all"]
    rows = measured.table(header, [_row(one) for one in found])
    text = (
        f"{replicas} replicas, {4 * NUMEL / 1e6:.1f} MB of fp32 each, over one store in memory; "
        "every one ends with the same bits, and they are those of a mean that is added up replica "
        "by replica. Requests are those of the replica that made the most, of that method, and in "
        "brackets what is predicted. How often a listing is asked for depends on how long a round "
        "takes, which here is the time of one process for all of them "
        f"({', '.join(f'{one.seconds:.0f} s' for one in found)}).\n\n{rows}"
    )
    document = {"replicas": replicas, "numel": NUMEL, "cases": [_values(one) for one in found]}
    measured.write("many_replicas", f"{replicas} replicas, one round", where, text, document)


if __name__ == "__main__":
    main()
