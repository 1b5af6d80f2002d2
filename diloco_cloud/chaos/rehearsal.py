"""A run of small replicas on this machine, from its launch to what the referee needs."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from diloco_cloud.chaos import LAST_STEP
from diloco_cloud.chaos.chronicle import Chronicle
from diloco_cloud.chaos.evidence import Evidence, Window
from diloco_cloud.chaos.records import BACKEND_NAME, WarmReplica
from diloco_cloud.chaos.storm import Fault, Injection, Storm
from diloco_cloud.chaos.warm import WarmProcessExecutor
from diloco_cloud.errors import DilocoError, ExchangeError
from diloco_cloud.run import Run, launch
from diloco_cloud.run.restarter import Event
from diloco_cloud.run.spec import RunSpec
from diloco_cloud.store import open_store

logger = logging.getLogger(__name__)

TRAINER: Final = "diloco_cloud.chaos.trainer:train"
#: Rounds from the word that the run is to end until it does, so that all have read it.
_ROUNDS_TO_STOP: Final = 3
#: Seconds that all may take to be in a round, a killed replica to be back, and the run to end.
_GATHER_S: Final = 90.0
_RECOVER_S: Final = 60.0
_END_S: Final = 90.0
#: Restarts in a row that a storm may need: it does not wait for a replica to get into a round.
_MAX_RESTARTS: Final = 1000


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What runs.

    Attributes:
        replicas: number of ranks.
        sync_every: inner steps of a round.
        step_s: seconds of an inner step, by a replica that has its own accelerator; 0: as fast as
            the shared machine lets it.
        heartbeat_s: between two signs of life.
        supervision_s: between two looks of the supervisor.
        quorum: of a round; None: half of those that are there.
        grace_s: for the others once a quorum is in; None: learnt.
        join_s: to wait for the others, where nobody is left of those who were in the last round.
        rounds: of the run; None: until :meth:`Rehearsal.end`.
        seed: of the training.
        trainer_args: further ones.
    """

    replicas: int
    sync_every: int = 20
    step_s: float = 0.1
    heartbeat_s: float = 0.5
    supervision_s: float = 0.3
    quorum: int | None = None
    grace_s: float | None = None
    join_s: float = 90.0
    rounds: int | None = None
    seed: int = 0
    trainer_args: Mapping[str, Any] = field(default_factory=dict)

    def spec(self, name: str) -> RunSpec:
        """The spec of a run of that name."""
        return RunSpec(
            run_id=name,
            backend=BACKEND_NAME,
            replicas=self.replicas,
            trainer=TRAINER,
            trainer_args={"step_s": self.step_s, **self.trainer_args},
            sync_every=self.sync_every,
            rounds=self.rounds,
            quorum=self.quorum,
            grace=self.grace_s,
            seed=self.seed,
            heartbeat=self.heartbeat_s,
            join_timeout=self.join_s,
            round_timeout=_GATHER_S,
            max_restarts=_MAX_RESTARTS,
        )


class Rehearsal:
    """One supervised run, followed by a referee; a context manager.

    Args:
        name: of the run.
        fleet: what runs.
        executor: runs it.
        directory: for the store.
        on_event: told what the supervisor sees and does.

    Attributes:
        run: the run itself.
        chronicle: its decisions so far.
        injections: faults it has met so far.
    """

    def __init__(
        self,
        name: str,
        fleet: Fleet,
        executor: WarmProcessExecutor,
        directory: str | os.PathLike[str],
        *,
        on_event: Callable[[Event], None] = lambda _event: None,
    ) -> None:
        self._name, self._fleet, self._executor = name, fleet, executor
        self._on_event = on_event
        store = Path(directory).absolute() / "store"
        self._partitions = Path(directory).absolute() / "partitions" / name
        self._uri = f"faults+{store.as_uri()}?partition_file={self._partitions}/{{rank}}"
        self._plain = open_store(store.as_uri()).child(name)
        self.chronicle = Chronicle(self._plain)
        self.injections: list[Injection] = []
        self._stopped = threading.Event()

    def __enter__(self) -> Rehearsal:
        self.run: Run = launch(self._fleet.spec(self._name), self._uri, executor=self._executor)
        self.chronicle.__enter__()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._supervisor.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._supervisor.join()
        if exc_type is not None:
            self._cancel()
        self.chronicle.__exit__(exc_type, exc_value, traceback)

    # -- the course of it ----------------------------------------------------------------------

    def gather(self, replicas: int | None = None) -> None:
        """Wait until a round had all replicas in it.

        Args:
            replicas: how many; default: as many as were launched.

        Raises:
            ExchangeError: they do not come together.
        """
        wanted = self._fleet.replicas if replicas is None else replicas
        newest = self.chronicle.last

        def complete() -> bool:
            entry = self.chronicle.entries.get(self.chronicle.last)
            is_new = self.chronicle.last > newest
            return entry is not None and is_new and len(entry.commit.contributors) >= wanted

        if not self.chronicle.await_(complete, _GATHER_S):
            raise ExchangeError(
                f"{wanted} replicas were in no common round within {_GATHER_S:.0f} s",
                fix="The machine may be too slow for so many: use fewer, or longer rounds.",
            )

    def measure(
        self,
        seconds: float,
        faults: Sequence[Fault] = (),
        *,
        spare_the_weak: bool = False,
    ) -> Window:
        """Let so many seconds pass, with faults; returns when that was.

        Args:
            seconds: at most; a run that ends ends it.
            faults: the storm.
            spare_the_weak: whether a replica that was killed is not hit again before it is back.
        """
        storm = Storm(
            faults,
            self.replica,
            self._partitions,
            self.injections,
            may_hit=lambda fault: not spare_the_weak or self.has_recovered(fault.rank),
        )
        began = time.time()
        storm.run(self._stopped, seconds=seconds)
        return began, time.time()

    def replica(self, rank: int) -> WarmReplica | None:
        """The live process of a rank."""
        return self._executor.running(self.run.provider_name, rank)

    def has_recovered(self, rank: int) -> bool:
        """Whether a rank has been in a committed round since it was last killed."""
        attempts = (
            one.attempt
            for one in self.injections
            if one.fault.rank == rank and one.fault.kind == "kill" and one.attempt is not None
        )
        killed = max(attempts, default=None)
        return killed is None or self.chronicle.is_back(rank, killed)

    def recover(self) -> None:
        """Wait until every replica that was killed is back, if it comes back at all."""
        hit = {one.fault.rank for one in self.injections}
        self.chronicle.await_(lambda: all(map(self.has_recovered, hit)), _RECOVER_S)

    def end(self) -> Evidence:
        """Let the killed come back, end the run, and gather what it left behind."""
        self.recover()
        if self._fleet.rounds is None and not self._stopped.is_set():
            last = self.chronicle.last + 1 + _ROUNDS_TO_STOP
            self._plain.put(LAST_STEP, str(last).encode())
        self._stopped.wait(_END_S)
        state = self.run.status().state
        if not self._stopped.is_set():
            self._cancel()
        self.chronicle.look()
        results = self.run.results()
        return Evidence(
            entries=self.chronicle.entries,
            changed=frozenset(self.chronicle.changed),
            injections=self.injections,
            metrics=self.run.metrics(),
            outcomes=results.outcomes,
            manifest=results.manifest,
            state=state,
        )

    # -- inside --------------------------------------------------------------------------------

    def _supervise(self) -> None:
        supervisor = self.run.supervisor(on_event=self._on_event)
        try:
            for _ in supervisor.watch(self._fleet.supervision_s):
                if self._stopped.is_set():
                    return
        except DilocoError:
            logger.exception("the supervisor of %s has failed", self._name)
        finally:
            self._stopped.set()

    def _cancel(self) -> None:
        self._stopped.set()
        self.run.cancel()
