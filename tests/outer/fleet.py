"""A small elastic run in threads, with a supervisor that starts again who dies.

A replica dies by its store: from some request on, every one raises, which is all that the others
can see of a killed process. What happened is checked against counts that the product does not make.
"""

from __future__ import annotations

import copy
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from replicas import Job, build, inner_optimizer, inner_step
from torch import nn

from diloco_cloud.errors import ExchangeError
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.membership import Membership
from diloco_cloud.outer import HandedOver, MockManager, OuterLoop, make_diloco_outer_loop
from diloco_cloud.outer.progress import RoundReport
from diloco_cloud.result import read_result
from diloco_cloud.store.base import ObjectStore
from diloco_cloud.store.memory import MemoryStore

METHODS = (
    "create",
    "put",
    "get",
    "get_range",
    "head",
    "list",
    "list_dirs",
    "delete",
    "delete_many",
)
#: Imported here, so that no first life is seconds later than the others.
_ = OuterLoop
TOKENS = 10

Life: TypeAlias = tuple[int, int]


class Killed(BaseException):
    """What a killed process would not live to see."""


@dataclass
class Death:
    """Where a life ends: at its ``call``-th request, which is still made (``after``) or not.

    Attributes:
        method, key: counts only requests of this method on keys that contain this.
    """

    call: int = 1
    after: bool = False
    method: str | None = None
    key: str = ""

    def counts(self, method: str, args: tuple[Any, ...]) -> bool:
        if self.method is not None and method != self.method:
            return False
        return self.key in (str(args[0]) if args else "")


class WatchedStore:
    """Passes calls on until its owner dies, and remembers what was committed."""

    def __init__(
        self,
        inner: ObjectStore,
        death: Death | None,
        commits: dict[str, bytes],
        stored: set[str] | None = None,
    ) -> None:
        self._stored = set() if stored is None else stored
        self.requests = 0
        self.dead = False
        self._calls = 0
        self._lock = threading.Lock()
        self._inner, self._death, self._commits = inner, death, commits

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._watched(name, found) if name in METHODS else found

    def _watched(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self._lock:
                if self.dead:
                    raise Killed
                self.requests += 1
                last = False
                if self._death is not None and self._death.counts(name, args):
                    self._calls += 1
                    last = self._calls == self._death.call
                self.dead = last
            if last and self._death is not None and not self._death.after:
                raise Killed
            result = method(*args)
            if name in ("create", "put"):
                self._stored.add(args[0])
            if name == "create" and str(args[0]).endswith("/commit"):
                assert args[0] not in self._commits, "two commits of one round"
                self._commits[args[0]] = bytes(args[1])
            if last:
                raise Killed
            return result

        return call


@dataclass
class End:
    """How a rank came to its end."""

    digest: str
    round: int
    attempt: int
    reports: list[RoundReport]


@dataclass
class Fleet:
    """A run.

    Attributes:
        job: what is trained; ``job.steps`` is its length in the run's own time.
        pace_s: seconds of an inner step, by rank.
        restart_s: seconds from a death to the next life's start.
        restart_when: what the next life waits for besides.
        lives: how often a rank may begin.
        launched_with: ranks that the run began with; the others come later.
        retired: ranks that end with their first life.
        second_lives: by rank, when a next life of it begins while the first one still runs.
        superseded: what then became of the first one.
        processed: tokens that each life processed, counted by the trainer.
        commits: all decisions, by key.
        stored: keys that anybody has put or created.
        requests: by life, how many it made.
        manager: settings of the managers.
        key: of a signed run.
        codec: of contributions.
        first_attempt: of every rank, in a run that is resumed.
    """

    job: Job
    pace_s: Mapping[int, float] = field(default_factory=dict)
    restart_s: float = 0.0
    restart_when: Callable[[], bool] = lambda: True
    lives: int = 6
    quorum: int | None = None
    grace_s: float | None = None
    snapshot_every: int = 2
    join_timeout_s: float = 20.0
    start_s: Mapping[int, float] = field(default_factory=dict)
    store: Callable[[str], ObjectStore] = MemoryStore
    outlier_norm: float | None = None
    launched_with: int | None = None
    retired: frozenset[int] | set[int] = frozenset()
    second_lives: Mapping[int, float] = field(default_factory=dict)
    superseded: dict[int, Exception] = field(default_factory=dict)
    on_step: Callable[[int, int, int, MockManager], None] = lambda *_args: None
    processed: dict[Life, int] = field(default_factory=lambda: defaultdict(int))
    stored: set[str] = field(default_factory=set)
    commits: dict[str, bytes] = field(default_factory=dict)
    requests: dict[Life, int] = field(default_factory=dict)
    manager: Mapping[str, Any] = field(default_factory=dict)
    key: bytes | None = None
    codec: str = "fp32"
    first_attempt: int = 0
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    def run(self, deaths: Mapping[Life, Death] | None = None) -> dict[int, End]:
        """Run to the end; returns each rank's, with everything checked that must always hold."""
        # Threads share the random state, so the models are built before they start.
        models = [build(self.job, seed=rank)[0] for rank in range(self.job.world_size)]

        def rank(rank: int) -> End | None:
            time.sleep(self.start_s.get(rank, 0.0))
            for attempt in range(self.first_attempt, self.first_attempt + self.lives):
                death = (deaths or {}).get((rank, attempt))
                store = WatchedStore(self.store(self.name), death, self.commits, self.stored)
                try:
                    return self.live(rank, attempt, store, copy.deepcopy(models[rank]))
                except (Killed, HandedOver):
                    if rank in self.retired:
                        return None
                    time.sleep(self.restart_s)
                    _await(self.restart_when)
                except ExchangeError as error:
                    if rank not in self.second_lives:
                        raise
                    self.superseded[rank] = error
                    return None
                finally:
                    self.requests[rank, attempt] = store.requests
            raise AssertionError(f"replica {rank} never finished")

        def second(rank: int) -> End:
            time.sleep(self.second_lives[rank])
            store = WatchedStore(self.store(self.name), None, self.commits)
            return self.live(rank, 1, store, copy.deepcopy(models[rank]))

        with ThreadPoolExecutor(2 * self.job.world_size) as pool:
            futures = [pool.submit(rank, r) for r in range(self.job.world_size)]
            futures += [pool.submit(second, r) for r in self.second_lives]
            places = [*range(self.job.world_size), *self.second_lives]
            found = [future.result(timeout=90) for future in futures]
        ends = {r: end for r, end in zip(places, found, strict=True) if end is not None}
        self.check(ends)
        return ends

    def live(self, rank: int, attempt: int, store: Any, model: nn.Module) -> End:
        """One life of one rank."""
        membership = Membership(
            self.launched_with or self.job.world_size,
            quorum=self.quorum,
            grace_s=self.grace_s,
            heartbeat_s=0.2,
        )
        door = ObjectStoreAllReduce(
            f"memory://{self.name}",
            rank,
            self.job.world_size,
            attempt=attempt,
            timeout_s=20.0,
            join_timeout_s=self.join_timeout_s,
            poll_interval_s=0.01,
            reduction=self.job.reduction,
            codec=self.codec,
            membership=membership,
            store=store,
            key=self.key,
        )
        door.exchange.outlier_norm = self.outlier_norm
        door.exchange.chunk_bytes, door.exchange.patience_s = 256, 0.05
        door.exchange.contributing.overwrites_from = 0  # as large models do
        if self.job.streams:
            door.exchange.contributing.streams_from = 0
        reports: list[RoundReport] = []
        manager = MockManager(
            door, snapshot_every=self.snapshot_every, on_round=reports.append, **self.manager
        )
        optimizer = inner_optimizer(model)
        try:
            outer = make_diloco_outer_loop(
                manager,
                [model] if self.job.fragments == 1 else [model.a, model.b, model.c],
                optimizer,
                sync_every=self.job.sync_every,
                fragment_sync_delay=self.job.delay,
                fragment_update_alpha=self.job.alpha,
                model=model,
            )
            with outer:
                step = outer.inner_steps_done
                while outer.schedule_step < self.job.steps:
                    self.on_step(rank, attempt, step, manager)
                    time.sleep(self.pace_s.get(rank, 0.0))
                    self.processed[rank, attempt] += TOKENS
                    manager.report(tokens=TOKENS)
                    inner_step(self.job, model, optimizer, rank, step)
                    step += 1
            manager.shutdown(finished=True)
        finally:
            manager.shutdown()
        digest = manager.global_digest()
        assert digest is not None
        return End(digest, manager.current_round(), attempt, reports)

    # -- what must hold whatever happens -------------------------------------------------------

    def check(self, ends: Mapping[int, End]) -> None:
        last = max(end.round for end in ends.values())
        digests = {end.digest for end in ends.values() if end.round == last}
        assert len(digests) == 1, f"replicas end differently: {ends}"
        result = read_result(MemoryStore(self.name))
        assert result is not None
        assert (result.manifest["round"], result.manifest["digest"]) == (last, digests.pop())
        self.check_ledger()

    def history(self) -> list[Commit]:
        """All decisions, in order; one for every round."""
        found = sorted((Commit.decode(data) for data in list(self.commits.values())), key=_round)
        assert [commit.round for commit in found] == list(range(len(found)))
        return found

    def check_ledger(self) -> None:
        """Every token that a life processed is merged once, discarded, or died with its life."""
        merged: dict[tuple[int, int, int], int] = defaultdict(int)
        for commit in self.history():
            for entry in commit.ledger:
                assert entry.balance == 0, commit
            if commit.decision == "commit":
                for one in commit.contributors:
                    merged[commit.fragment, one.rank, one.attempt] += one.tokens
        for (fragment, rank, attempt), tokens in merged.items():
            if self.manager.get("checkpoint_inner"):  # It may be an earlier life's work, too.
                tokens = sum(n for (f, r, _), n in merged.items() if (f, r) == (fragment, rank))
                assert tokens <= sum(n for (r, _), n in self.processed.items() if r == rank)
            else:
                assert tokens <= self.processed[rank, attempt]
        for commit in {c.fragment: c for c in self.history()}.values():
            for entry in commit.ledger:
                mine = {k: v for k, v in merged.items() if k[:2] == (commit.fragment, entry.rank)}
                assert entry.merged == sum(mine.values())


def _round(commit: Commit) -> int:
    return commit.round


def _await(condition: Callable[[], bool]) -> None:
    """Wait until it holds, for 30 seconds at most."""
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline, "what a restart waited for never came"
        time.sleep(0.01)
