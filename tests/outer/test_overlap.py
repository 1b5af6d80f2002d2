"""With a delay, the exchange runs while training goes on."""

from __future__ import annotations

import threading
import uuid

import pytest
from replicas import Job, build, inner_optimizer, inner_step

from diloco_cloud.errors import StoreError
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.outer import MockManager, make_diloco_outer_loop
from diloco_cloud.outer.progress import RoundReport
from diloco_cloud.store.base import Data
from diloco_cloud.store.memory import MemoryStore


class GatedStore(MemoryStore):
    """Lets a contribution through only once the trainer has gone on to a later step."""

    def __init__(self, name: str, patience_s: float) -> None:
        super().__init__(name)
        self.gone_on = threading.Event()
        self._patience_s = patience_s

    def create(self, key: str, data: Data) -> None:
        if "/put/" in key and not self.gone_on.wait(self._patience_s):
            raise StoreError("the trainer does not go on before this transfer has ended")
        super().create(key, data)


def train(delay: int, patience_s: float) -> list[RoundReport]:
    name = uuid.uuid4().hex
    job = Job(sync_every=6, world_size=1)
    store = GatedStore(name, patience_s)
    door = ObjectStoreAllReduce(f"memory://{name}", 0, 1, store=store)
    reports: list[RoundReport] = []
    model, fragments = build(job)
    optimizer = inner_optimizer(model)
    outer = make_diloco_outer_loop(
        MockManager(door, on_round=reports.append),
        fragments,
        optimizer,
        sync_every=job.sync_every,
        fragment_sync_delay=delay,
    )
    with outer:
        for t in range(job.sync_every):
            inner_step(job, model, optimizer, 0, t)
            if t == job.sync_every - delay:  # one step after the one that began the sync
                store.gone_on.set()
    return reports


def test_delayed_exchange_does_not_stop_the_steps_in_between() -> None:
    (report,) = train(delay=2, patience_s=30.0)
    assert report.decision == "commit"


def test_exchange_without_delay_blocks_the_trainer() -> None:
    with pytest.raises(StoreError, match="does not go on"):
        train(delay=0, patience_s=0.2)
