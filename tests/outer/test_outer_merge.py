"""Directions are merged with embeddings left as they are, through the whole outer loop."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from diloco_cloud import keys, replica_entrypoint
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.weighting import PLAIN
from diloco_cloud.outer import MockManager, make_diloco_outer_loop
from diloco_cloud.replica.identity import Identity
from diloco_cloud.run.spec import RunSpec
from diloco_cloud.store.memory import MemoryStore

STEPS = 4


def train(name: str, rank: int) -> str | None:
    door = ObjectStoreAllReduce(f"memory://{name}", rank, 2, timeout_s=30, poll_interval_s=0.02)
    door.exchange.merge, door.exchange.weighting = "rda", "quality"
    manager = MockManager(door)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    with make_diloco_outer_loop(manager, model, optimizer, sync_every=STEPS):
        for _ in range(2 * STEPS):
            optimizer.zero_grad()
            rows = torch.randint(5, (2 + rank, 2), generator=data)
            model(rows).square().mean().backward()
            manager.report(tokens=len(rows))
            optimizer.step()
    return manager.global_digest()


def test_embeddings_are_averaged_as_they_are() -> None:
    name = uuid.uuid4().hex
    with ThreadPoolExecutor(2) as pool:
        digests = list(pool.map(train, [name] * 2, range(2)))
    assert digests[0] == digests[1]
    commit = Commit.decode(MemoryStore(name).get(keys.commit(1, 0)))
    assert [norm == PLAIN for norm in commit.norms] == [True, False, False]
    assert all(norm > 0 for norm in commit.norms[1:])
    # Tokens times tokens per step: 2 per step for one, 3 for the other.
    weights = [one.weight for one in commit.contributors]
    assert weights[1] / weights[0] == pytest.approx((3 / 2) ** 2)


def test_a_runs_spec_says_how_its_replicas_merge() -> None:
    spec = RunSpec(run_id="merging", merge="rda", weighting="quality")
    store = MemoryStore(uuid.uuid4().hex)
    manager = replica_entrypoint._manager(store.uri, Identity(0, 0), 2, spec=spec, store=store)
    exchange = manager.store.exchange
    assert (exchange.merge, exchange.weighting) == ("rda", "quality")
