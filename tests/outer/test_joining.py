"""Starting, restarting and ending: nothing but the store is needed, and nothing is lost."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from replicas import Job, build, inner_optimizer, inner_step
from safetensors.torch import load
from torch import nn

from diloco_cloud.errors import DriftError, ExchangeError, LayoutMismatchError, RoundTimeoutError
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.exchange.watch import Clock
from diloco_cloud.outer import MockManager, OuterLoop, make_diloco_outer_loop
from diloco_cloud.outer.result import global_digest
from diloco_cloud.result import read_result
from diloco_cloud.store import open_store


@pytest.fixture
def uri() -> str:
    return f"memory://{uuid.uuid4().hex}"


class Replica:
    """A replica in a thread; the model is built before, since threads share the random state."""

    def __init__(
        self, uri: str, rank: int, job: Job, *, attempt: int = 0, seed: int = 0, **settings: Any
    ) -> None:
        self.rank, self.job = rank, job
        door = ObjectStoreAllReduce(
            uri,
            rank,
            job.world_size,
            attempt=attempt,
            timeout_s=30.0,
            poll_interval_s=0.02,
            clock=settings.pop("clock", None),
            reduction=job.reduction,
        )
        door.exchange.chunk_bytes = 256
        self.manager = MockManager(door, **settings)
        self.model, self.fragments = build(job, seed)
        self.opt = inner_optimizer(self.model)

    def outer(self) -> OuterLoop:
        return make_diloco_outer_loop(
            self.manager,
            self.fragments,
            self.opt,
            sync_every=self.job.sync_every,
            fragment_sync_delay=self.job.delay,
            fragment_update_alpha=self.job.alpha,
            model=self.model,
        )

    def train(self, until: int, *, leave: bool = False) -> str:
        """Train from where the run is to inner step ``until``; return the global digest."""
        with self.outer() as outer:
            for t in range(outer.inner_steps_done, until):
                inner_step(self.job, self.model, self.opt, self.rank, t)
        digest = self.manager.global_digest()
        self.manager.shutdown(finished=leave)
        assert digest is not None
        return digest


def together(work: Callable[[Replica], Any], replicas: list[Replica]) -> list[Any]:
    with ThreadPoolExecutor(len(replicas)) as pool:
        return [f.result(timeout=60) for f in [pool.submit(work, r) for r in replicas]]


def fleet(uri: str, job: Job, **settings: Any) -> list[Replica]:
    return [Replica(uri, rank, job, seed=rank, **settings) for rank in range(job.world_size)]


JOBS = [
    Job(),
    Job(world_size=3, reduction="sharded"),
    Job(fragments=3, delay=1, alpha=0.25),
]


@pytest.mark.parametrize("job", JOBS, ids=str)
@pytest.mark.parametrize("stop_at", [6, 18])
def test_a_stopped_run_continues_from_its_last_round(uri: str, job: Job, stop_at: int) -> None:
    """Outer state, momentum and step come back to the bit; inner optimizer state does not."""
    first = together(lambda r: r.train(stop_at), fleet(uri, job, snapshot_every=4))
    again = fleet(uri, job, snapshot_every=4, attempt=1)

    def rejoin(replica: Replica) -> tuple[str | None, int]:
        replica.outer()
        return replica.manager.global_digest(), replica.manager.current_step()

    rejoined = together(rejoin, again)
    rounds = stop_at // (job.sync_every // job.fragments) + job.fragments - 1
    assert rejoined == [(first[0], rounds)] * job.world_size
    for replica in again:
        replica.manager.shutdown()
    final = together(lambda r: r.train(36, leave=True), fleet(uri, job, attempt=2))
    assert len(set(final)) == 1


def test_momentum_comes_back(uri: str) -> None:
    job = Job()
    fresh = fleet(uri, job, snapshot_every=100)
    together(lambda r: r.train(18), fresh)
    late = Replica(uri, 1, job, attempt=1, seed=9)
    late.outer()
    for mine, theirs in zip(
        late.manager.fragments.states(), fresh[0].manager.fragments.states(), strict=True
    ):
        assert mine.optimizer.keys() == theirs.optimizer.keys()
        for name, tensor in mine.optimizer.items():
            assert torch.equal(tensor, theirs.optimizer[name])


def test_a_killed_replica_comes_back_while_the_other_waits(uri: str) -> None:
    job = Job(steps=24)
    dead, survivor = Replica(uri, 0, job), Replica(uri, 1, job, seed=1)

    def run(replica: Replica) -> str:
        if replica is survivor:
            return replica.train(24, leave=True)
        outer = replica.outer()
        outer.__enter__()
        for t in range(15):  # dies in the middle of the third round
            inner_step(job, replica.model, replica.opt, 0, t)
        back = Replica(uri, 0, job, attempt=1, seed=5)
        return back.train(24, leave=True)

    assert len(set(together(run, [dead, survivor]))) == 1


def test_a_replica_killed_after_contributing_is_not_waited_for_twice(uri: str) -> None:
    """Its contribution stays valid: the peer commits with it, and the new life adopts that."""
    job = Job(steps=12)
    dead, survivor = Replica(uri, 0, job), Replica(uri, 1, job, seed=1)
    outer = dead.outer()
    outer.__enter__()
    for t in range(5):
        inner_step(job, dead.model, dead.opt, 0, t)
    door = dead.manager.store
    door.exchange.waiting_for = lambda _missing: door.exchange.interrupt()  # contributes, gives up
    with pytest.raises(ExchangeError, match="given up"):
        inner_step(job, dead.model, dead.opt, 0, 5)
    digests = together(
        lambda r: r.train(12, leave=True), [Replica(uri, 0, job, attempt=1), survivor]
    )
    assert len(set(digests)) == 1


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_the_prefix_holds_a_bounded_number_of_rounds(uri: str, job: Job) -> None:
    together(lambda r: r.train(240, leave=True), fleet(uri, job, snapshot_every=3))
    store = open_store(uri)
    # Two intervals of snapshots, the open one, and the rounds of the final sync.
    assert len(store.list_dirs("rounds/")) <= 3 * 3 + job.fragments
    assert len(store.list_dirs("state/")) <= 3


def test_initial_parameters_are_fetched_only_where_they_differ(uri: str) -> None:
    job = Job(world_size=3)
    replicas = [Replica(uri, r, job, seed=int(r == 2)) for r in range(3)]
    reads: dict[int, int] = {}

    def begin(replica: Replica) -> str | None:
        from diloco_cloud.store.metered import MeteredStore

        replica.manager.store.prefix = MeteredStore(replica.manager.store.prefix)
        replica.outer()
        state = replica.manager.fragments.states()[0]
        small = sum(p.nbytes for p in state.parameters)
        reads[replica.rank] = replica.manager.prefix.usage.bytes_received // small
        return replica.manager.global_digest()

    assert len(set(together(begin, replicas))) == 1
    assert reads == {0: 0, 1: 0, 2: 1}


def test_unequal_step_counts_do_not_block_the_longer_replica(uri: str) -> None:
    job = Job(world_size=2)
    lengths = {0: 12, 1: 30}
    together(lambda r: r.train(lengths[r.rank], leave=True), fleet(uri, job))
    result = read_result(open_store(uri))
    assert result is not None
    assert (result.manifest["round"], result.manifest["step"]) == (5, 5)


def test_the_result_is_exported_once_everybody_has_left(uri: str) -> None:
    job = Job(fragments=3)
    replicas = fleet(uri, job)
    replicas[0].manager.save_result({"config.json": b"{}"})
    with pytest.raises(ValueError, match="not an object key"):
        replicas[0].manager.save_result({"../escape": b""})
    with pytest.raises(ValueError, match="written by the outer loop"):
        replicas[0].manager.save_result({"manifest.json": b""})
    digests = together(lambda r: r.train(24, leave=True), replicas)
    store = open_store(uri)
    result = read_result(store)
    assert result is not None
    assert result.manifest["digest"] == digests[0]
    assert store.get(result.directory + "config.json") == b"{}"
    assert result.manifest["files"] == ["config.json", "model.safetensors"]
    weights = load(store.get(result.directory + "model.safetensors"))
    model = replicas[1].model
    model.load_state_dict(weights)
    for mine, other in zip(model.parameters(), replicas[0].model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert global_digest(replicas[0].manager.fragments.states()) == digests[0]


def test_another_model_is_refused_when_joining(uri: str) -> None:
    Replica(uri, 0, Job()).outer()
    other = Replica(uri, 1, Job())
    other.model.a = nn.Linear(8, 31)
    other.opt = inner_optimizer(other.model)
    with pytest.raises(LayoutMismatchError, match=r"a\.weight is \(31, 8\)"):
        other.outer()
    with pytest.raises(LayoutMismatchError, match="1 fragments, this replica 3"):
        Replica(uri, 1, Job(fragments=3)).outer()


def test_without_replica_0_the_others_say_so(uri: str) -> None:
    time = [0.0]
    clock = Clock(now=lambda: time[0], sleep=lambda s: time.__setitem__(0, time[0] + s))
    with pytest.raises(RoundTimeoutError, match="replica 0 did not publish"):
        Replica(uri, 1, Job(), clock=clock).outer()


def test_a_drifted_replica_is_told_and_never_averaged(uri: str) -> None:
    job = Job(world_size=3)

    def run(replica: Replica) -> str:
        outer = replica.outer()
        if replica.rank == 1:
            # As a bit flip in the global parameters would be.
            outer._fragments[0].original_parameters["p0"][0, 0] += 1e-3
        with outer:
            for t in range(6):
                inner_step(job, replica.model, replica.opt, replica.rank, t)
        return str(replica.manager.global_digest())

    replicas = fleet(uri, job)
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(run, r) for r in replicas]
        with pytest.raises(DriftError, match="replica 1's work was taken against other global"):
            futures[1].result(timeout=60)
        assert futures[0].result(timeout=60) == futures[2].result(timeout=60)


def test_divergence_everywhere_is_discarded_then_ends_the_run(uri: str) -> None:
    job = Job(world_size=2, sync_every=1)

    def run(replica: Replica) -> int:
        start = [p.detach().clone() for p in replica.model.parameters()]
        with pytest.raises(ExchangeError, match="5 rounds in a row had nothing to average"):
            replica.train(20)
        for before, after in zip(start, replica.model.parameters(), strict=True):
            assert torch.equal(before, after)
        return replica.manager.current_step()

    replicas = [Replica(uri, r, job) for r in range(2)]
    for replica in replicas:
        for group in replica.opt.param_groups:
            group["lr"] = float("nan")
    assert together(run, replicas) == [0, 0]


def test_a_timeout_leaves_the_global_parameters_in_the_model(uri: str) -> None:
    time = [0.0]
    clock = Clock(now=lambda: time[0], sleep=lambda s: time.__setitem__(0, time[0] + s))
    alone = Replica(uri, 0, Job(), clock=clock)
    start = [p.detach().clone() for p in alone.model.parameters()]
    with pytest.raises(RoundTimeoutError, match="replica 1 did not contribute"):
        alone.train(6)
    for before, after in zip(start, alone.model.parameters(), strict=True):
        assert torch.equal(before, after)
