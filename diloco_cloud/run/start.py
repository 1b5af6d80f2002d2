"""Starts replicas of a run: all of those asked for, or none."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from diloco_cloud.errors import DilocoError, LaunchError
from diloco_cloud.executor import (
    ChecksLaunch,
    LaunchOptions,
    PreviewsLaunch,
    ReplicaHandle,
    ServerlessExecutor,
)
from diloco_cloud.run.intents import Start, kept_fresh
from diloco_cloud.run.lives import read_lives
from diloco_cloud.run.names import provider_name
from diloco_cloud.run.record import Launched, RunRecord, write_launched
from diloco_cloud.run.rollback import Begun, failed_on, undo
from diloco_cloud.run.spec import RunSpec
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)

ENTRYPOINT = "diloco_cloud.replica_entrypoint"

_T = TypeVar("_T")


@dataclass(frozen=True)
class LaunchRequest:
    """What an executor is asked to do; ``--dry-run`` shows it.

    Attributes:
        entrypoint_args: the run's URI and its spec's hash, nothing else: some providers allow
            256 characters per argument.
    """

    n_replicas: int
    entrypoint: str
    entrypoint_args: dict[str, Any]
    gpu: str | None
    timeout: int
    options: LaunchOptions

    def submit(
        self, method: Callable[..., _T], on_launched: Callable[[ReplicaHandle], None] | None = None
    ) -> _T:
        """Call a method of an executor that takes what ``launch_replicas`` takes."""
        return method(
            self.n_replicas,
            self.entrypoint,
            self.entrypoint_args,
            gpu=self.gpu,
            timeout=self.timeout,
            options=dataclasses.replace(self.options, on_launched=on_launched),
        )

    def check(self, executor: ServerlessExecutor) -> None:
        """Let an executor find out what it can, before anything is written.

        Raises:
            UsageError: it could not do what is asked.
        """
        if isinstance(executor, PreviewsLaunch):
            self.submit(executor.preview_launch)
        if isinstance(executor, ChecksLaunch):
            self.submit(executor.check_launch)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, without the callback."""
        values = dataclasses.asdict(self)
        del values["options"]["on_launched"]
        return values


def build_request(
    spec: RunSpec,
    run_uri: str,
    *,
    backend: str | None = None,
    ranks: Sequence[int] | None = None,
    attempt: int = 0,
    world_size: int | None = None,
    name: str | None = None,
) -> LaunchRequest:
    """What the executor of a backend is asked for, to start replicas of a run there.

    Args:
        spec: of the run.
        run_uri: of its prefix.
        backend: default: the run's own.
        ranks: default: those that are launched on that backend.
        attempt: which life of theirs this is.
        world_size: how many replicas the run has; default: as many as are launched.
        name: that of the run's record; without one, of a run that could be launched now.
    """
    side = spec.on(backend or spec.backend)
    chosen = list(spec.ranks_by_backend.get(side.backend, ()) if ranks is None else ranks)
    return LaunchRequest(
        n_replicas=len(chosen),
        entrypoint=ENTRYPOINT,
        entrypoint_args={"rendezvous_uri": run_uri, "spec_hash": spec.digest},
        gpu=side.gpu,
        timeout=spec.timeout,
        options=LaunchOptions(
            name=name or provider_name(spec.run_id, run_uri, 0.0),
            ranks=chosen,
            world_size=spec.replicas if world_size is None else world_size,
            attempt=attempt,
            env=dict(side.env),
            secrets=side.secrets,
            imports=_imports(spec.trainer),
        ),
    )


def _imports(trainer: str) -> tuple[str, ...]:
    """The modules that replicas need besides this package."""
    module = trainer.partition(":")[0]
    return () if module.partition(".")[0] == __name__.partition(".")[0] else (module,)


def start_request(record: RunRecord, run_uri: str, start: Start) -> LaunchRequest:
    """What the executor of its backend is asked for by a start of a run's replicas."""
    return build_request(
        record.spec,
        run_uri,
        backend=start.backend,
        ranks=start.ranks,
        attempt=start.attempt,
        world_size=start.world_size,
        name=record.name,
    )


def start_replicas(
    store: ObjectStore,
    record: RunRecord,
    executor: ServerlessExecutor,
    start: Start,
    *,
    request: LaunchRequest | None = None,
    clock: Callable[[], float] = time.time,
) -> list[ReplicaHandle]:
    """Start replicas that were announced, recording each handle as it comes; all or none.

    Args:
        store: the run's own prefix.
        record: what its ``run.json`` says.
        executor: of ``start.backend``.
        start: at least one rank, whose intents are written.
        request: what the executor is asked for; default: replicas of the run.
        clock: seconds since the epoch.

    Raises:
        LaunchError: the backend failed; what had been started was cancelled.
    """
    one = Begun(start, executor)
    try:
        begin(store, record, one, request or start_request(record, store.uri, start), clock=clock)
    except BaseException as error:  # Ctrl-C too must not leave billed replicas behind
        undo(store, [one], error, at=clock())
        raise
    return one.handles


def begin(
    store: ObjectStore,
    record: RunRecord,
    one: Begun,
    request: LaunchRequest,
    *,
    clock: Callable[[], float] = time.time,
) -> None:
    """Start replicas that were announced; what an error leaves behind is the caller's to undo.

    Args:
        store: the run's own prefix.
        record: what its ``run.json`` says.
        one: the start; its handles are filled in as they come.
        request: what its executor is asked for.
        clock: seconds since the epoch.

    Raises:
        LaunchError: the backend failed.
    """
    start = one.start

    def record_handle(handle: ReplicaHandle) -> None:
        one.handles.append(handle)
        write_launched(store, Launched(start.attempt, start.backend, handle), at=clock())

    with import_path(record.directory), kept_fresh(store, start, at=clock()):
        try:
            handles = request.submit(one.executor.launch_replicas, record_handle)
        except DilocoError:
            raise
        except Exception as error:
            failure = LaunchError(f"{failed_on(start.backend)}{error}")
            failure.backend = start.backend
            raise failure from error
    recorded = {handle.rank for handle in one.handles}
    for handle in handles:  # an executor may know its handles only at the end
        if handle.rank not in recorded:
            record_handle(handle)
    _cancel_unwanted(store, one)


def _cancel_unwanted(store: ObjectStore, one: Begun) -> None:
    """End what a user cancelled while it was being started, and had no handle to be ended by."""
    lives = read_lives(store)
    for handle in one.handles:
        if "cancel" in lives.of(handle.rank, one.start.attempt):
            try:
                one.executor.cancel(handle)
            except Exception as error:  # no reason to undo the others
                logger.error(
                    "replica %d was cancelled while it was started, and still runs on %s (%s); "
                    "cancel it again",
                    *(handle.rank, one.start.backend, error),
                )


@contextlib.contextmanager
def import_path(directory: str) -> Iterator[None]:
    """Let local replicas, which inherit ``sys.path``, find a trainer in the launch directory.

    On another machine than the launcher's, it is looked for in the working directory.
    """
    place = directory if os.path.isdir(directory) else os.getcwd()
    added = place not in sys.path
    if added:
        sys.path.insert(0, place)
    try:
        yield
    finally:
        if added:
            sys.path.remove(place)
