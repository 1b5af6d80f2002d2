"""The replica of a rehearsal: what it learns, and how it keeps time."""

from __future__ import annotations

import time
import uuid

import pytest
import torch

from diloco_cloud.chaos import LAST_STEP
from diloco_cloud.chaos.task import Language, TinyModel, batch_seed
from diloco_cloud.chaos.trainer import Pace, train
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.outer import MockManager


def test_a_language_is_its_seed() -> None:
    one, same, other = (Language.make(5, seed) for seed in (1, 1, 2))
    assert torch.equal(one.transitions, same.transitions)
    assert not torch.equal(one.transitions, other.transitions)
    assert torch.allclose(one.transitions.sum(-1), torch.ones(25))


def test_no_model_beats_the_entropy() -> None:
    language = Language.make(5, 0)

    class Perfect(torch.nn.Module):
        def forward(self, contexts: torch.Tensor) -> torch.Tensor:
            return language.transitions[contexts].log()

    assert language.loss(Perfect()) == pytest.approx(language.entropy)
    assert language.loss(TinyModel(5, 4)) > language.entropy


def test_batches_are_drawn_from_the_language() -> None:
    language = Language.make(3, 0)
    contexts, following = language.batch(200_000, seed=1)
    counts = torch.zeros(9, 3)
    counts.index_put_((contexts, following), torch.ones(()), accumulate=True)
    assert torch.allclose(counts / counts.sum(-1, keepdim=True), language.transitions, atol=0.02)


def test_batches_are_each_ranks_and_positions_own() -> None:
    seeds = {batch_seed(7, rank, step) for rank in range(40) for step in range(100)}
    assert len(seeds) == 4000


def replica(**arguments: object) -> dict[str, float]:
    """The result of a run of one replica."""
    door = ObjectStoreAllReduce(f"memory://{uuid.uuid4().hex}", 0, 1)
    last_step = arguments.pop("last_step", None)
    if last_step is not None:
        door.prefix.put(LAST_STEP, str(last_step).encode())
    manager = MockManager(door)
    try:
        return train(manager=manager, rank=0, world_size=1, **arguments)  # type: ignore[arg-type]
    finally:
        manager.shutdown()


def test_it_learns() -> None:
    short = replica(sync_every=10, rounds=1)
    longer = replica(sync_every=10, rounds=20)
    assert longer["entropy"] < longer["val_loss"] < short["val_loss"] - 0.5
    assert (longer["inner_steps"], longer["tokens"]) == (200, 200 * 64)
    assert (short["val_step"], longer["val_step"]) == (1, 20)
    assert short["val_state"] != longer["val_state"]
    assert short == replica(sync_every=10, rounds=1)


def test_a_run_without_length_ends_at_the_word() -> None:
    assert replica(sync_every=2, last_step=3)["inner_steps"] == 6


def test_pace_waits_for_what_is_left_and_makes_up_for_nothing() -> None:
    pace = Pace(0.05)
    began = time.monotonic()
    for work_s in (0.0, 0.08, 0.0):  # the second takes too long
        pace.begin()
        time.sleep(work_s)
        pace.wait()
    assert time.monotonic() - began >= 0.05 + 0.08 + 0.05
    unpaced = Pace(0.0)
    unpaced.begin()
    began = time.monotonic()
    unpaced.wait()
    assert time.monotonic() - began < 0.05
