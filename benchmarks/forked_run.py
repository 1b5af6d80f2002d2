"""A small run of real processes that meet in a directory, with a supervisor that starts again who
was killed.

Replicas are forked from a process that has imported everything, so that a life begins within
milliseconds, as in a warm pool. They share the directory, as they would a bucket; besides, a page
of shared memory tells the supervisor what a killed process cannot report any more.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch._dynamo  # what a replica's first steps would import, one life at a time
from torch import nn

import diloco_cloud.outer.loop  # noqa: F401  (likewise)
from diloco_cloud import keys
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.exchange.membership import Membership
from diloco_cloud.outer import MockManager, make_diloco_outer_loop
from diloco_cloud.outer.progress import RoundReport
from diloco_cloud.replica.heartbeat import Heartbeat
from diloco_cloud.replica.identity import Identity
from diloco_cloud.replica.roster import Roster
from diloco_cloud.store.base import ObjectStore
from diloco_cloud.store.directory import DirectoryStore

TOKENS = 10
#: Lives of one rank for which the shared page has room.
MAX_LIVES = 1024

LifeId: TypeAlias = tuple[int, int]

_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Job:
    """What is trained and how it is synchronised.

    Attributes:
        rounds: that the run has, unless the board is told another number while it goes on.
        pace_s: seconds that an inner step takes at least, by rank.
        width: of the model, which has ``width * (width + 1)`` parameters.
        streams: an all-gather's contributions are sent chunk by chunk, as large ones are.
        keep: which of the deleted objects are kept for the checks, by what their key contains.
    """

    replicas: int = 4
    rounds: int = 10
    sync_every: int = 6
    pace_s: Sequence[float] = (0.0, 0.0, 0.0, 0.0)
    snapshot_every: int = 2
    heartbeat_s: float = 0.1
    reduction: str = "all-gather"
    streams: bool = False
    chunk_bytes: int = 512
    width: int = 16
    poll_interval_s: float = 0.02
    keep: tuple[str, ...] = ("/commit", "/put/", "/part/", "state/00000000/")
    outer: Mapping[str, float] = field(
        default_factory=lambda: {"outer_lr": 0.7, "outer_momentum": 0.9}
    )

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Linear(self.width, self.width)


class KeepingStore(DirectoryStore):
    """A directory store that keeps a link to what it deletes, for the checks afterwards.

    Args:
        root: of the store.
        kept: directory of the links; a key that was deleted twice has two.
        keep: what the key of an object that is kept contains.
    """

    def __init__(self, root: Path, kept: Path, keep: Sequence[str]) -> None:
        super().__init__(root, fsync=False)  # a killed process leaves the page cache as it is
        self._kept, self._keep = kept, keep

    def delete(self, key: str) -> None:
        if any(part in key for part in self._keep):
            link = self._kept / uuid.uuid4().hex
            with contextlib.suppress(FileNotFoundError):
                os.link(self._path(key), link)
                link.rename(self._kept / f"{key.replace('/', '+')}@{link.stat().st_ino}")
        super().delete(key)


class Board:
    """Shared memory: what of a life outlives its process."""

    def __init__(self, replicas: int, rounds: int) -> None:
        #: The number of rounds of the run.
        self.rounds = _FORK.RawValue("q", rounds)
        self._tokens = _FORK.RawArray("q", replicas * MAX_LIVES)
        #: By rank, the newest round that it has seen decided.
        self.round = _FORK.RawArray("q", [-1] * replicas)
        #: By rank, as its rules had it after that: how long a round may take, in seconds, until a
        #: replica that died is no longer waited for; and how long one usually takes.
        self.deadline_s = _FORK.RawArray("d", replicas)
        #: By rank, seconds that its inner steps took, and those that it had a processor for them.
        self.steps_s = _FORK.RawArray("d", replicas)
        self.steps_cpu_s = _FORK.RawArray("d", replicas)
        self.round_s = _FORK.RawArray("d", replicas)

    @property
    def slowdown(self) -> float:
        """How many times longer the run's own work took than it would on a machine of its own."""
        return sum(self.steps_s) / max(sum(self.steps_cpu_s), 1e-9)

    def process(self, rank: int, attempt: int) -> None:
        """Count the tokens of an inner step."""
        self._tokens[rank * MAX_LIVES + attempt] += TOKENS

    def processed(self, rank: int, attempt: int) -> int:
        """Tokens that a life has processed."""
        return int(self._tokens[rank * MAX_LIVES + attempt])


class Companion:
    """Goes along with each life, in its process; does nothing by itself."""

    def store(self, inner: ObjectStore, rank: int, attempt: int) -> ObjectStore:
        """The run's prefix, as this life sees it."""
        return inner

    def on_round(self, report: RoundReport) -> None:
        """A round is decided; its outer step has not been taken yet."""

    def on_step(self, manager: MockManager) -> None:
        """Before an inner step."""


@dataclass
class End:
    """How a rank came to its end: with which global parameters, after how many decisions."""

    digest: str
    round: int
    attempt: int


@dataclass
class ForkedRun:
    """One run.

    Attributes:
        root: an empty directory: the run's prefix and everything else about it.
        restart_s: seconds from a death to the next life's start, by how often the rank has died
            before; the last stands for all later ones.
        limit_s: seconds after which the run has failed.
        started: when each life began, in seconds since the epoch.
        ends: of ranks.
    """

    job: Job
    root: Path
    companion: Companion = field(default_factory=Companion)
    restart_s: Sequence[float] = (0.0,)
    limit_s: float = 60.0
    board: Board = field(init=False)
    started: dict[LifeId, float] = field(default_factory=dict, init=False)
    ends: dict[int, End] = field(default_factory=dict, init=False)
    _living: dict[int, tuple[int, Any]] = field(default_factory=dict, init=False)
    _due: list[tuple[float, int, int]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.board = Board(self.job.replicas, self.job.rounds)
        for name in ("run", "kept", "ends", "logs"):
            (self.root / name).mkdir(parents=True)

    @property
    def prefix(self) -> DirectoryStore:
        """The run's prefix."""
        return KeepingStore(self.root / "run", self.root / "kept", self.job.keep)

    @property
    def living(self) -> Mapping[int, tuple[int, int]]:
        """By rank, the attempt and the process id of who lives."""
        return {rank: (attempt, p.pid) for rank, (attempt, p) in self._living.items()}

    def run(self, tick_s: float = 1.0) -> None:
        """Run to the end.

        Args:
            tick_s: seconds between two calls of :meth:`tick`, at most.

        Raises:
            RuntimeError: a replica failed, or the run took too long.
        """
        deadline = time.monotonic() + self.limit_s
        try:
            for rank in range(self.job.replicas):
                self._start(rank, 0)
            while self._living or self._due:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no end after {self.limit_s:g} s; alive: {self.living}")
                self.tick()
                self._reap(self._pause_s(tick_s))
        finally:
            for _, process in self._living.values():
                process.kill()
                process.join()

    def tick(self) -> None:
        """Called now and then while the run goes on."""

    # -- inside --------------------------------------------------------------------------------

    def _start(self, rank: int, attempt: int) -> None:
        self.prefix.put(keys.handle(rank, attempt), b"{}")
        process = _FORK.Process(target=self._main, args=(rank, attempt), daemon=True)
        self.started[rank, attempt] = time.time()
        process.start()
        self._living[rank] = (attempt, process)

    def _pause_s(self, tick_s: float) -> float:
        next_due = min((at for at, _, _ in self._due), default=float("inf"))
        return max(0.0, min(tick_s, next_due - time.monotonic()))

    def _reap(self, timeout_s: float) -> None:
        """Start whose time has come; wait for a death or an end, and see to it."""
        for at, rank, attempt in list(self._due):
            if at <= time.monotonic():
                self._due.remove((at, rank, attempt))
                self._start(rank, attempt)
        wait([process.sentinel for _, process in self._living.values()], timeout_s)
        for rank, (attempt, process) in list(self._living.items()):
            if process.exitcode is None:
                continue
            process.join()
            del self._living[rank]
            if process.exitcode == -signal.SIGKILL:
                pause = self.restart_s[min(attempt, len(self.restart_s) - 1)]
                self._due.append((time.monotonic() + pause, rank, attempt + 1))
            elif process.exitcode:
                log = (self.root / f"logs/{rank}.{attempt}").read_text()
                raise RuntimeError(f"replica {rank}, attempt {attempt} failed:\n{log[-4000:]}")
            else:
                self.ends[rank] = End(**json.loads((self.root / f"ends/{rank}").read_text()))

    def _main(self, rank: int, attempt: int) -> None:
        """A life, in a process of its own."""
        with open(self.root / f"logs/{rank}.{attempt}", "w") as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
        logging.basicConfig(
            level=logging.WARNING, format="%(relativeCreated)d %(name)s %(message)s", force=True
        )
        end = _Life(self, rank, attempt).live()
        (self.root / f"ends/{rank}").write_text(json.dumps(vars(end)))


class _Life:
    """One life of one rank."""

    def __init__(self, run: ForkedRun, rank: int, attempt: int) -> None:
        self._run, self._job = run, run.job
        self._rank, self._attempt = rank, attempt
        self._store = run.companion.store(run.prefix, rank, attempt)
        self._door = self._open_door()
        self._heartbeat = Heartbeat(
            run.prefix, Identity(rank, attempt), period_s=run.job.heartbeat_s
        )

    def live(self) -> End:
        """Train to the end of the run."""
        self._heartbeat.start()
        manager = MockManager(
            self._door, snapshot_every=self._job.snapshot_every, on_round=self._on_round
        )
        self._heartbeat.follow(manager.progress)
        try:
            self._train(manager)
            manager.shutdown(finished=True)
        finally:
            manager.shutdown()
            self._heartbeat.close(join_s=1.0)
        digest = manager.global_digest()
        assert digest is not None
        return End(digest, manager.current_round(), self._attempt)

    def _train(self, manager: MockManager) -> None:
        job, board = self._job, self._run.board
        model = job.model(seed=self._rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loop = make_diloco_outer_loop(
            manager, model, optimizer, sync_every=job.sync_every, **job.outer
        )
        with loop:
            while loop.schedule_step < board.rounds.value * job.sync_every:
                self._run.companion.on_step(manager)
                time.sleep(job.pace_s[self._rank])
                board.process(self._rank, self._attempt)
                manager.report(tokens=TOKENS)
                wall, cpu = time.perf_counter(), time.thread_time()
                x = torch.randn(4, job.width)
                optimizer.zero_grad()
                (model(x) - x.sin()).square().mean().backward()
                board.steps_s[self._rank] += time.perf_counter() - wall
                board.steps_cpu_s[self._rank] += time.thread_time() - cpu
                optimizer.step()  # which may synchronise

    def _open_door(self) -> ObjectStoreAllReduce:
        job = self._job
        membership = Membership(
            job.replicas,
            quorum=None,
            heartbeat_s=job.heartbeat_s,
            roster=Roster(self._run.prefix, job.heartbeat_s),
        )
        door = ObjectStoreAllReduce(
            str(self._run.root / "run"),
            self._rank,
            job.replicas,
            attempt=self._attempt,
            timeout_s=30.0,
            join_timeout_s=30.0,
            poll_interval_s=job.poll_interval_s,
            reduction=job.reduction,
            membership=membership,
            store=self._store,
        )
        door.exchange.chunk_bytes, door.exchange.patience_s = job.chunk_bytes, 0.05
        door.exchange.contributing.streams_from = 0 if job.streams else None
        return door

    def _on_round(self, report: RoundReport) -> None:
        rules, board = self._door.exchange.membership, self._run.board
        round_s = rules.round_s or 0.0
        others = set(range(self._job.replicas)) - {self._rank}
        board.round[self._rank] = report.round
        board.round_s[self._rank] = round_s
        board.deadline_s[self._rank] = rules.deadline_s(
            round_s, self._door.exchange.timeout_s
        ) + rules.grace(others, pace_s=round_s)
        self._run.companion.on_round(report)


def paces(rng: random.Random, replicas: int, pace_s: float) -> tuple[float, ...]:
    """A pace for each rank, within a fifth of ``pace_s``."""
    return tuple(pace_s * rng.uniform(0.8, 1.2) for _ in range(replicas))
