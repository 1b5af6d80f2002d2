"""A replica that dies at any request to the store, before or after its effect, comes back.

Its store raises at the k-th call and at every later one, which is all that a killed process's
peers can see of it; then the rank's next life begins. Whatever k is, the run must end with the same
parameters everywhere and with its result exported.
"""

from __future__ import annotations

import copy
import random
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import pytest
from replicas import Job, build, inner_optimizer, inner_step
from torch import nn

from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.outer import MockManager, make_diloco_outer_loop
from diloco_cloud.result import read_result
from diloco_cloud.store import open_store
from diloco_cloud.store.base import ObjectStore
from diloco_cloud.store.memory import MemoryStore

#: By (rank, attempt): the call at which that life dies, and whether the call is still made.
Deaths: TypeAlias = dict[tuple[int, int], tuple[int, bool]]
METHODS = ("create", "put", "get", "get_range", "head", "list", "list_dirs", "delete_many")
NEVER = 10**9


class Killed(BaseException):
    """What a killed process would not live to see."""


class DyingStore:
    """Passes calls on to ``inner`` until the ``k``-th, which it makes (``after``) or does not."""

    def __init__(self, inner: ObjectStore, k: int, *, after: bool) -> None:
        self.calls = 0
        self._lock = threading.Lock()
        self._inner, self._k, self._after = inner, k, after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._dying(found) if name in METHODS else found

    def _dying(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self._lock:
                self.calls += 1
                number = self.calls
            if number > self._k or (number == self._k and not self._after):
                raise Killed
            result = method(*args)
            if number == self._k:
                raise Killed
            return result

        return call


class Scenario:
    """A small run, the same every time but for who dies where.

    Args:
        job: what is trained.
        steps: inner steps of each rank.
    """

    def __init__(self, job: Job, steps: list[int]) -> None:
        self.job, self.steps = job, steps
        # Threads share the random state, so the models are built before they start.
        self.models = [build(job, seed=rank)[0] for rank in range(job.world_size)]

    def run(self, deaths: Deaths | None = None) -> dict[int, int]:
        """Run to the end and check it; returns the number of calls each rank's last life made."""
        name = uuid.uuid4().hex

        def lives(rank: int) -> tuple[str, int, int]:
            for attempt in range(4):
                k, after = (deaths or {}).get((rank, attempt), (NEVER, False))
                store = DyingStore(MemoryStore(name), k, after=after)
                try:
                    return (*self.live(name, rank, attempt, store), store.calls)
                except Killed:
                    continue
            raise AssertionError("killed three times at most, and yet never finished")

        with ThreadPoolExecutor(self.job.world_size) as pool:
            futures = [pool.submit(lives, rank) for rank in range(self.job.world_size)]
            ends = [future.result(timeout=60) for future in futures]
        last = max(round_ for _, round_, _ in ends)
        digests = {digest for digest, round_, _ in ends if round_ == last}
        assert len(digests) == 1
        result = read_result(open_store(f"memory://{name}"))
        assert result is not None
        assert result.manifest["digest"] == digests.pop()
        return {rank: calls for rank, (_, _, calls) in enumerate(ends)}

    def live(self, name: str, rank: int, attempt: int, store: Any) -> tuple[str, int]:
        """One life of one rank: its final digest, and the rounds it saw."""
        door = ObjectStoreAllReduce(
            f"memory://{name}",
            rank,
            self.job.world_size,
            attempt=attempt,
            timeout_s=20.0,
            poll_interval_s=0.01,
            reduction=self.job.reduction,
            store=store,
        )
        door.exchange.chunk_bytes, door.exchange.patience_s = 256, 0.05
        manager = MockManager(door, snapshot_every=2)
        model = copy.deepcopy(self.models[rank])
        optimizer = inner_optimizer(model)
        try:
            outer = make_diloco_outer_loop(
                manager,
                _fragments(self.job, model),
                optimizer,
                sync_every=self.job.sync_every,
                fragment_sync_delay=self.job.delay,
                fragment_update_alpha=self.job.alpha,
                model=model,
            )
            with outer:
                for t in range(outer.inner_steps_done, self.steps[rank]):
                    inner_step(self.job, model, optimizer, rank, t)
            digest, rounds = manager.global_digest(), manager.current_round()
            manager.shutdown(finished=True)
        finally:
            manager.shutdown()
        assert digest is not None
        return digest, rounds


def _fragments(job: Job, model: nn.Module) -> list[nn.Module]:
    return [model] if job.fragments == 1 else [model.a, model.b, model.c]


SCENARIOS = {
    "plain": (Job(), [26, 26]),
    "sharded": (Job(world_size=3, reduction="sharded"), [20, 20, 20]),
    "streaming, unequal": (Job(fragments=3, delay=1, alpha=0.25), [14, 22]),
    "fragments, unequal": (Job(fragments=3), [24, 11]),
}


def one_death(rng: random.Random, calls: dict[int, int]) -> Deaths:
    """Anybody, anywhere."""
    rank = rng.randrange(len(calls))
    return {(rank, 0): (rng.randint(1, calls[rank]), rng.random() < 0.5)}


def same_rank_twice(rng: random.Random, calls: dict[int, int]) -> Deaths:
    """And its next life somewhere too."""
    rank = rng.randrange(len(calls))
    return {(rank, a): (rng.randint(1, calls[rank]), rng.random() < 0.5) for a in range(2)}


def everybody(rng: random.Random, calls: dict[int, int]) -> Deaths:
    """Each at a request of its own."""
    return {(rank, 0): (rng.randint(1, calls[rank]), rng.random() < 0.5) for rank in calls}


@pytest.mark.parametrize("deaths", [one_death, same_rank_twice, everybody])
@pytest.mark.parametrize("name", SCENARIOS)
def test_replicas_killed_at_any_request_come_back(
    name: str,
    deaths: Callable[[random.Random, dict[int, int]], Deaths],
    caplog: pytest.LogCaptureFixture,
) -> None:
    scenario = Scenario(*SCENARIOS[name])
    calls = scenario.run()
    rng = random.Random(0)
    for _ in range(12):
        chosen = deaths(rng, calls)
        try:
            scenario.run(chosen)
        except BaseException as error:
            error.add_note(f"deaths (rank, attempt): (call, after it) = {chosen}")
            raise
    assert "is of no use" not in caplog.text  # of a snapshot that later rounds contradict
