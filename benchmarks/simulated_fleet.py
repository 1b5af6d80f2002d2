"""Many replicas in one process, which meet in rounds over one store in memory.

Each has a :class:`RoundExchange` of its own, with all its threads, a metered view of the store, and
real bytes; so agreement and reduction are the product's. What is simulated is the machines: all
share this one's processor, so the seconds say nothing of a fleet. What a replica asks of the store
is that of a larger model in larger chunks: it depends on how many chunks there are.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from diloco_cloud import keys
from diloco_cloud.exchange.codecs import get_codec
from diloco_cloud.exchange.contribution import decode
from diloco_cloud.exchange.following import sums_of
from diloco_cloud.exchange.links import Link
from diloco_cloud.exchange.prediction import Cost, Job, Kind, Plan, predict
from diloco_cloud.exchange.rounds import RoundExchange
from diloco_cloud.exchange.upload import PARALLEL_WRITES
from diloco_cloud.exchange.volunteer import Volunteer
from diloco_cloud.exchange.watch import Clock
from diloco_cloud.exchange.work import Work
from diloco_cloud.store.memory import MemoryStore
from diloco_cloud.store.metered import MeteredStore, Usage
from diloco_cloud.store.prices import Prices

#: The planned model is so many times as large as the simulated one, and so are its chunks.
SCALE = 2048
#: What replicas and volunteers reach the store by, as the planner is told: 1 and 10 Gbit/s, 30 ms.
LINK, VOLUNTEER_LINK = Link.of(125e6, 125e6, 0.03), Link.of(1.25e9, 1.25e9, 0.03)
#: Encoded bytes that one read asks for at most, where contributions are not sent by chunks.
_READ_BYTES = 4 * 2**20
#: Never waited for: here all owners are slow, and none is gone.
_PATIENCE_S = 1e6
#: Replicas that share a core before the fleet's clock is made slower than the wall's. Beyond, most
#: of the processor would go into looking whether somebody else has come further.
_PER_CORE = 8


@dataclass(frozen=True)
class Case:
    """One way to exchange.

    Attributes:
        codec: by name.
        kind: of the plan.
        chunks: of one contribution.
        volunteers: that average; for the plan "reducers".
    """

    codec: str
    kind: Kind
    chunks: int
    volunteers: int = 0

    def plan(self, nbytes: int) -> Plan:
        """The plan for a model of so many bytes."""
        unit = _READ_BYTES if self.chunks == 1 else nbytes // self.chunks
        return Plan(self.kind, unit, PARALLEL_WRITES)

    def job(self, replicas: int, nbytes: int) -> Job:
        """What so many replicas of such a model have to move."""
        put, sums = (_ratio(name) for name in (self.codec, sums_of(self.codec)))
        return Job(
            nbytes=nbytes,
            contributors=replicas,
            put_ratio=put,
            sum_ratio=sums,
            reducers=(VOLUNTEER_LINK,) * self.volunteers,
        )

    def predicted(self, replicas: int, nbytes: int, prices: Prices, *, near: bool = True) -> Cost:
        """What a round of such a model is expected to cost.

        Args:
            replicas: how many.
            nbytes: of the model.
            prices: of the store.
            near: whether the replicas are where the bucket is.
        """
        job = self.job(replicas, nbytes)
        return predict(self.plan(nbytes), job, [LINK], prices, same_region=near)


@dataclass(frozen=True)
class Found:
    """What a case came to; figures are those of its last round.

    Attributes:
        rounds: that were run and checked.
        nbytes: of the simulated model.
        usage: of each replica, by rank.
        volunteers: usage of each volunteer.
        error: largest deviation from a mean in float64, over that mean's root mean square.
        seconds, cpu_s: of all rounds of all replicas, in one process.
        threads: the most that there were.
    """

    case: Case
    replicas: int
    rounds: int
    nbytes: int
    usage: Sequence[Usage]
    volunteers: Sequence[Usage]
    error: float
    seconds: float
    cpu_s: float
    threads: int

    def most(self, *methods: str) -> int:
        """Calls of these methods by the replica that made the most."""
        return max(sum(usage.requests[one] for one in methods) for usage in self.usage)

    def dollars(self, prices: Prices) -> float:
        """For the requests of all, volunteers included."""
        every = (*self.usage, *self.volunteers)
        return prices.requests(sum((usage.requests for usage in every), Counter()))


@dataclass
class Fleet:
    """Replicas that go on from round to round.

    Attributes:
        case: how they exchange.
        replicas: how many.
        numel: elements of what each contributes, fp32.
    """

    case: Case
    replicas: int
    numel: int
    stores: list[MeteredStore] = field(init=False)
    _name: str = field(default_factory=lambda: uuid.uuid4().hex, init=False)
    _exchanges: list[RoundExchange] = field(init=False)
    _clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        cores = len(os.sched_getaffinity(0))
        self._clock = slower_clock(max(1.0, self.replicas / cores / _PER_CORE))
        self.stores = [MeteredStore(MemoryStore(self._name)) for _ in range(self.replicas)]
        self._exchanges = [
            RoundExchange(
                store,
                "many",
                rank,
                self.replicas,
                codec=self.case.codec,
                reduction="all-gather" if self.case.kind == "all-gather" else "sharded",
                reducers=lambda: self.case.volunteers,
                chunk_bytes=4 * self.numel // self.case.chunks,
                patience_s=_PATIENCE_S,
                clock=self._clock,
            )
            for rank, store in enumerate(self.stores)
        ]
        for one in self._exchanges:
            one.contributing.streams_from = 0 if self.case.chunks > 1 else None

    @contextmanager
    def volunteers(self) -> Iterator[list[MeteredStore]]:
        """The volunteers at work, as the stores that they use."""
        over = threading.Event()
        stores = [MeteredStore(MemoryStore(self._name)) for _ in range(self.case.volunteers)]
        with ThreadPoolExecutor(max(1, len(stores)), "volunteer") as pool:
            try:
                for index, store in enumerate(stores):
                    one = Volunteer(store, "many", index, clock=self._clock)
                    pool.submit(one.work, over.is_set)
                yield stores
            finally:
                over.set()

    def meet(self, round_: int) -> float:
        """Run a round in which everybody takes part; the error of the mean, as in :class:`Found`.

        Raises:
            AssertionError: the replicas disagree, or have something else than the mean.
        """
        given = [values(rank, self.numel, round_) for rank in range(self.replicas)]

        def one(rank: int) -> tuple[str, torch.Tensor]:
            result = self._exchanges[rank].exchange(round_, 0, [given[rank]], Work(tokens=1))
            assert result.tensors is not None, result.reason
            return result.commit.digest, result.tensors[0]

        with ThreadPoolExecutor(self.replicas, "replica") as pool:
            ends = list(pool.map(one, range(self.replicas)))
        mean = ends[0][1]
        assert len({digest for digest, _ in ends}) == 1, "the replicas read different decisions"
        assert all(torch.equal(other, mean) for _, other in ends), "the replicas disagree"
        is_raw = self.case.codec == "raw"
        exact = slow_mean(given) if is_raw else slow_mean(self._as_sent(round_), of_senders=True)
        torch.testing.assert_close(mean.double(), exact, rtol=1e-5, atol=1e-6)
        return float((mean.double() - exact).abs().max() / exact.square().mean().sqrt())

    def _as_sent(self, round_: int) -> Iterator[torch.Tensor]:
        """What each sent of its values and of what it had kept back, read from the store."""
        store, codec = MemoryStore(self._name), get_codec(self.case.codec)
        for rank in range(self.replicas):
            key = keys.put(round_, 0, rank, 0)
            data = store.get(key)
            header, numel = decode(data, key), self.numel // self.case.chunks
            starts = [header.size + header.chunk_start(chunk) for chunk in range(header.chunks)]
            pieces = [data[at : at + size] for at, size in zip(starts, header.sizes, strict=True)]
            yield torch.cat([codec.decode(memoryview(piece), numel) for piece in pieces])

    def clear(self) -> None:
        """Delete what is in the store, which lives as long as the process."""
        store = MemoryStore(self._name)
        store.delete_many(info.key for info in reversed(store.list()))


def simulate(case: Case, replicas: int, numel: int, rounds: int = 2) -> Found:
    """Let so many replicas meet, and compare what they got.

    Nothing is known before the first round of how long it takes, so the later ones look less often.

    Args:
        case: how they exchange.
        replicas: how many.
        numel: elements of what each contributes, fp32; a multiple of the chunks.
        rounds: at least 1.

    Raises:
        AssertionError: they disagree, or have something else than the mean.
    """
    fleet = Fleet(case, replicas, numel)
    error, before, helped = 0.0, [Usage()] * replicas, [Usage()] * case.volunteers
    began, cpu = time.perf_counter(), time.process_time()
    with fleet.volunteers() as volunteers, _counted_threads() as threads:
        for round_ in range(rounds):
            before = [store.usage for store in fleet.stores]
            helped = [store.usage for store in volunteers]
            error = max(error, fleet.meet(round_))
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
    usage = [store.usage - earlier for store, earlier in zip(fleet.stores, before, strict=True)]
    others = [store.usage - earlier for store, earlier in zip(volunteers, helped, strict=True)]
    fleet.clear()
    return Found(case, replicas, rounds, 4 * numel, usage, others, error, took, cpu, max(threads()))


def values(rank: int, numel: int, round_: int = 0) -> torch.Tensor:
    """What a replica contributes: fp32, shape (numel,)."""
    seed = torch.Generator().manual_seed(1_000_003 * round_ + rank)
    return torch.randn(numel, generator=seed)


def slow_mean(contributions: Iterable[torch.Tensor], *, of_senders: bool = False) -> torch.Tensor:
    """In float64, one after the other.

    Args:
        contributions: fp32, shape (numel,).
        of_senders: of each coordinate over those that sent it, and so have something else than 0.
    """
    total: torch.Tensor | float = 0.0
    senders: torch.Tensor | int = 0
    for one in contributions:
        total = total + one.double()
        senders = senders + ((one != 0) if of_senders else torch.ones_like(one))
    return torch.as_tensor(total) / torch.as_tensor(senders).clamp(min=1)


def slower_clock(times: float) -> Clock:
    """A clock on which a second is so many seconds of the wall's."""
    return Clock(lambda: time.monotonic() / times, lambda seconds: time.sleep(seconds * times))


def _ratio(codec: str) -> float:
    return 1.0 if codec == "raw" else 32 / get_codec(codec).bits_per_parameter


@contextmanager
def _counted_threads() -> Iterator[Callable[[], list[int]]]:
    """How many threads there are, ten times a second; asked for afterwards."""
    over, seen = threading.Event(), [threading.active_count()]

    def count() -> None:
        while not over.wait(0.1):
            seen.append(threading.active_count())

    with ThreadPoolExecutor(1, "count") as pool:
        pool.submit(count)
        try:
            yield lambda: seen
        finally:
            over.set()
