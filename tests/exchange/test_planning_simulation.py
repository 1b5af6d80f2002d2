"""Predictions against a simulation of every request, over links that serve one byte after another.

The simulation knows nothing of the formulas: replicas upload chunks, notice one another's, read
them, and upload sums, with so many requests under way each way.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from diloco_cloud.exchange.links import Link
from diloco_cloud.exchange.planning import choose
from diloco_cloud.exchange.prediction import Job, Plan, predict
from diloco_cloud.exchange.upload import dealt

MB = 2**20


class Simulation:
    """Runs what is to happen in order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def run(self) -> float:
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()
        return self.now


@dataclass
class Way:
    """One direction of a link: so many requests at once, whose bytes go one after the other."""

    sim: Simulation
    rate: float
    latency: float
    parallel: int
    active: int = 0
    free_at: float = 0.0
    order: Any = field(default_factory=itertools.count)
    waiting: list[tuple[int, int, float, Callable[[], None]]] = field(default_factory=list)

    def request(self, rank: int, nbytes: float, then: Callable[[], None]) -> None:
        """Ask for a transfer; those of a lower rank go first."""
        heapq.heappush(self.waiting, (rank, next(self.order), nbytes, then))
        self._next()

    def _next(self) -> None:
        while self.waiting and self.active < self.parallel:
            *_, nbytes, then = heapq.heappop(self.waiting)
            self.active += 1
            self.sim.at(self.sim.now + self.latency, lambda n=nbytes, t=then: self._serve(n, t))

    def _serve(self, nbytes: float, then: Callable[[], None]) -> None:
        self.free_at = max(self.sim.now, self.free_at) + nbytes / self.rate

        def end() -> None:
            self.active -= 1
            then()
            self._next()

        self.sim.at(self.free_at, end)


def simulate_sharded(plan: Plan, job: Job, links: list[Link]) -> float:
    """Seconds until everybody has every sum."""
    sim, n = Simulation(), job.contributors
    ups = [Way(sim, one.up, one.latency, plan.parallel) for one in links]
    downs = [Way(sim, one.down, one.latency, plan.parallel) for one in links]
    sizes = [
        min(plan.chunk_bytes, job.nbytes - start)
        for start in range(0, job.nbytes, plan.chunk_bytes)
    ]
    missing = [n - 1] * len(sizes)

    def have_read_part(chunk: int, owner: int) -> None:
        missing[chunk] -= 1
        if missing[chunk] == 0:
            nbytes = sizes[chunk] / job.sum_ratio
            ups[owner].request(0, nbytes, lambda: have_written_sum(chunk, owner))

    def have_written_sum(chunk: int, owner: int) -> None:
        for i in range(n):
            if i != owner:
                noticed(i, lambda i=i: downs[i].request(1, sizes[chunk] / job.sum_ratio, done))

    def have_written_part(chunk: int, writer: int) -> None:
        owner = chunk % n
        if writer != owner:
            nbytes = sizes[chunk] / job.put_ratio
            then = lambda: have_read_part(chunk, owner)  # noqa: E731
            noticed(owner, lambda: downs[owner].request(0, nbytes, then))

    def noticed(who: int, then: Callable[[], None]) -> None:
        sim.at(sim.now + links[who].latency, then)  # an ideal listing

    def done() -> None:
        pass

    def begin() -> None:
        for i in range(n):
            for chunk in dealt(len(sizes), n, i):
                nbytes = sizes[chunk] / job.put_ratio
                ups[i].request(1, nbytes, lambda c=chunk, i=i: have_written_part(c, i))

    sim.at(max(one.latency for one in links), begin)  # the header that goes ahead
    return sim.run()


def simulate_all_gather(plan: Plan, job: Job, links: list[Link]) -> float:
    """Seconds until everybody has every chunk of all others."""
    sim, n = Simulation(), job.contributors
    ups = [Way(sim, one.up, one.latency, plan.parallel) for one in links]
    downs = [Way(sim, one.down, one.latency, plan.parallel) for one in links]
    sizes = [
        min(plan.chunk_bytes, job.nbytes - start) / job.put_ratio
        for start in range(0, job.nbytes, plan.chunk_bytes)
    ]
    missing = [n] * len(sizes)

    def have_written(chunk: int) -> None:
        missing[chunk] -= 1
        for i in range(n) if missing[chunk] == 0 else ():
            sim.at(sim.now + links[i].latency, lambda i=i: read(chunk, i))  # an ideal listing

    def read(chunk: int, i: int) -> None:
        for _ in range(n - 1):
            downs[i].request(0, sizes[chunk], lambda: None)

    def begin() -> None:
        for i in range(n):
            for chunk in range(len(sizes)):
                ups[i].request(0, sizes[chunk], lambda c=chunk: have_written(c))

    sim.at(max(one.latency for one in links), begin)  # the header that goes ahead
    return sim.run()


def fleet(n: int, rate: float, latency: float) -> list[Link]:
    return [Link.of(rate, rate, latency)] * n


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize(("rate", "latency"), [(25e6, 0.03), (6.25e6, 0.03), (100e6, 0.08)])
@pytest.mark.parametrize(("put", "sums"), [(1.0, 1.0), (7.76, 3.94)])
def test_sharded_takes_what_is_predicted(
    n: int, rate: float, latency: float, put: float, sums: float
) -> None:
    job = Job(
        nbytes=256 * MB,
        contributors=n,
        put_ratio=put,
        sum_ratio=sums,
        encode_rate=1e15,
        decode_rate=1e15,
    )
    links = fleet(n, rate, latency)
    plan = choose(job, links, kinds=("sharded",))
    simulated = simulate_sharded(plan, job, links)
    assert predict(plan, job, links).seconds == pytest.approx(simulated, rel=0.2)


@pytest.mark.parametrize("plan", [Plan("sharded", c * MB, p) for c in (1, 4, 16) for p in (4, 16)])
def test_sharded_is_predicted_for_plans_that_are_not_the_best(plan: Plan) -> None:
    job = Job(nbytes=512 * MB, contributors=8, encode_rate=1e15, decode_rate=1e15)
    links = fleet(8, 50e6, 0.05)
    simulated = simulate_sharded(plan, job, links)
    assert predict(plan, job, links).seconds == pytest.approx(simulated, rel=0.2)


@pytest.mark.parametrize("slow", [Link.of(10e6, 100e6, 0.03), Link.of(100e6, 20e6, 0.03)])
def test_sharded_is_predicted_where_one_link_is_slow(slow: Link) -> None:
    job = Job(nbytes=256 * MB, contributors=8, encode_rate=1e15, decode_rate=1e15)
    links = [slow, *fleet(7, 100e6, 0.03)]
    plan = choose(job, links, kinds=("sharded",))
    simulated = simulate_sharded(plan, job, links)
    assert predict(plan, job, links).seconds == pytest.approx(simulated, rel=0.2)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("rate", "latency"), [(25e6, 0.03), (6.25e6, 0.03), (100e6, 0.03)])
@pytest.mark.parametrize("put", [1.0, 3.9])
def test_all_gather_of_much_takes_what_is_predicted(
    n: int, rate: float, latency: float, put: float
) -> None:
    job = Job(nbytes=256 * MB, contributors=n, put_ratio=put, encode_rate=1e15, decode_rate=1e15)
    links = fleet(n, rate, latency)
    plan = choose(job, links, kinds=("all-gather",))
    simulated = simulate_all_gather(plan, job, links)
    assert predict(plan, job, links).seconds == pytest.approx(simulated, rel=0.2)
