"""One replica of a measurement, in a process of its own: the program that the fleet starts."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar

import exchange_tensors
import obstore  # noqa: F401  (imported before replicas are forked, not by each)
import torch
from bulk_transfer import PART_BYTES, BulkTransfer
from exchange_contenders import Contender
from process_meters import memory, own_cpu_s, peak_memory, reset_peak_memory
from reference_exchange import REFERENCES

from diloco_cloud.errors import NotFoundError
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.exchange.heaps import share_heaps
from diloco_cloud.store import open_store
from diloco_cloud.store.base import ObjectInfo, ObjectStore
from diloco_cloud.store.metered import MeteredStore

T = TypeVar("T")


@dataclass(frozen=True)
class Ready:
    """What a replica says before a round."""


@dataclass(frozen=True)
class Job:
    """What all replicas of a measurement do.

    Attributes:
        contender: how they exchange.
        uri: where.
        environments: of each replica; tell it which way to the store.
        near: of a volunteer.
        sizes: elements of each tensor.
        rounds: that are measured.
        threads: of torch, each.
    """

    contender: Contender
    uri: str
    environments: tuple[Mapping[str, str], ...]
    near: Mapping[str, str]
    sizes: tuple[int, ...]
    rounds: int
    threads: int

    @property
    def replicas(self) -> int:
        return len(self.environments)


@dataclass(frozen=True)
class Measure:
    """One replica's part in one round.

    Attributes:
        ended: seconds on the machine's monotonic clock.
        cpu_s: of the process, all threads.
        peak: bytes in memory at most, over what there was before the first round.
        requests: by method of the store; "missed" are reads of what was not there.
        sent, received: bytes of objects.
        planned_s: how long the planner expected the round to take; 0: it did not say.
    """

    ended: float
    cpu_s: float
    peak: int
    requests: Mapping[str, int]
    sent: int
    received: int
    planned_s: float


@dataclass(frozen=True)
class Action:
    """What to do in a round, once all that a first one takes is behind.

    Attributes:
        exchange: given the round.
        planned_s: how long that is expected to take, as far as anybody has said.
    """

    exchange: Callable[[int], object]
    planned_s: Callable[[], float] = lambda: 0.0


@dataclass(frozen=True)
class Outcome:
    """What a replica has after a round.

    Attributes:
        digest: of its tensors.
        error: of the mean, relative; of the first replica's last round.
    """

    digest: str
    error: float | None


class WatchedStore(MeteredStore):
    """Counts the reads of what is not there as "missed", beside all requests."""

    def get(self, key: str) -> bytes:
        return self._watched(lambda: MeteredStore.get(self, key))

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        return self._watched(lambda: MeteredStore.get_range(self, key, start, length))

    def head(self, key: str) -> ObjectInfo:
        return self._watched(lambda: MeteredStore.head(self, key))

    def child(self, path: str) -> WatchedStore:
        return WatchedStore(self._inner.child(path), self._meter)

    def _watched(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except NotFoundError:
            self._meter.request("missed")
            raise


def die_with_parent() -> None:
    """Let this process end with its fork server, which ends with the fleet's process."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def replica(job: Job, rank: int, parent: Connection) -> None:
    """Take part in all rounds of a job; tell the parent of each, or what went wrong.

    Before a round it says :class:`Ready`, and is told when to begin; after it, it sends a
    :class:`Measure`, and an :class:`Outcome` when it is asked for it.
    """
    die_with_parent()
    share_heaps()
    try:
        os.environ.update(job.environments[rank])
        torch.set_num_threads(job.threads)
        _take_part(job, rank, parent)
    except BaseException:
        parent.send(traceback.format_exc())


def _take_part(job: Job, rank: int, parent: Connection) -> None:
    tensors = exchange_tensors.empty(job.sizes)
    exchange_tensors.fill(tensors, rank, 0)
    store = WatchedStore(open_store(job.uri))
    store.put(f"warm/{rank}", bytes(64))  # the client's threads are nobody's memory below
    store.get(f"warm/{rank}")
    reset_peak_memory()
    before = memory()
    act = _warmed_up(job, rank, store, tensors)
    for round_ in range(1, job.rounds + 1):
        exchange_tensors.fill(tensors, rank, round_)
        usage, planned_s = store.usage, act.planned_s()
        parent.send(Ready())
        begins = parent.recv()
        cpu = own_cpu_s()
        time.sleep(max(0.0, begins - time.monotonic()))
        act.exchange(round_)
        ended, cpu = time.monotonic(), own_cpu_s() - cpu
        peak, used = peak_memory() - before, store.usage - usage
        parent.send(
            Measure(
                ended=ended,
                cpu_s=cpu,
                peak=max(peak, 0),
                requests=dict(used.requests),
                sent=used.bytes_sent,
                received=used.bytes_received,
                planned_s=planned_s,
            )
        )
        parent.recv()  # until all have ended: looking at the result takes CPU time
        error = None
        if rank == 0 and round_ == job.rounds and job.contender.kind != "limit":
            error = exchange_tensors.relative_error(tensors, job.replicas, round_)
        parent.send(Outcome(exchange_tensors.digest(tensors), error))


def _warmed_up(job: Job, rank: int, store: ObjectStore, tensors: list[torch.Tensor]) -> Action:
    """Go through all that a first round takes besides.

    A round of ours is warmed up by a round, a reference by two small tensors: it has nothing
    else to learn, and takes long. A limit puts there what its rounds read.
    """
    contender, replicas = job.contender, job.replicas
    if contender.kind == "limit":
        source = torch.cat(tensors).repeat(1 + PART_BYTES // (4 * sum(job.sizes)))
        body = memoryview(source.numpy()).cast("B")
        transfer = BulkTransfer(store, rank, replicas, contender.up, contender.down, body)
        transfer.prepare()
        return Action(transfer.round)
    if contender.kind == "reference":
        reference = REFERENCES[contender.name](store, rank, replicas)
        reference.allreduce([torch.zeros(1000), torch.zeros(10)])
        return Action(lambda _round: reference.allreduce(tensors))
    uri, options = job.uri, contender.options
    exchange = ObjectStoreAllReduce(uri, rank, replicas, store=store, **options)
    if contender.reducers:  # a run's replicas are told by its spec
        exchange.exchange.reducers = lambda: contender.reducers
    exchange.allreduce(tensors)

    def planned_s() -> float:
        plan = exchange.exchange.history.plans.get(0)
        return 0.0 if plan is None else plan.expected_s

    return Action(lambda _round: exchange.allreduce(tensors), planned_s)
