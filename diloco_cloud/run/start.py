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

from diloco_cloud import keys
from diloco_cloud.errors import DilocoError, LaunchError, UsageError
from diloco_cloud.executor import LaunchOptions, ReplicaHandle, ServerlessExecutor
from diloco_cloud.run.intents import Start, kept_fresh
from diloco_cloud.run.lives import read_lives
from diloco_cloud.run.record import Launched, RunRecord, create_json, write_launched
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

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, without the callback."""
        values = dataclasses.asdict(self)
        del values["options"]["on_launched"]
        return values


def build_request(
    spec: RunSpec,
    run_uri: str,
    *,
    ranks: Sequence[int] | None = None,
    attempt: int = 0,
    world_size: int | None = None,
) -> LaunchRequest:
    """What the executor is asked for, to start ``ranks`` (default: all) of a run."""
    chosen = list(range(spec.replicas) if ranks is None else ranks)
    return LaunchRequest(
        n_replicas=len(chosen),
        entrypoint=ENTRYPOINT,
        entrypoint_args={"rendezvous_uri": run_uri, "spec_hash": spec.digest},
        gpu=spec.gpu,
        timeout=spec.timeout,
        options=LaunchOptions(
            name=spec.run_id,
            ranks=chosen,
            world_size=spec.replicas if world_size is None else world_size,
            attempt=attempt,
            env=dict(spec.env),
            secrets=spec.secret_names,
        ),
    )


def start_replicas(
    store: ObjectStore,
    record: RunRecord,
    executor: ServerlessExecutor,
    start: Start,
    *,
    request: LaunchRequest | None = None,
    clock: Callable[[], float] = time.time,
) -> None:
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
    started: list[ReplicaHandle] = []

    def record_handle(handle: ReplicaHandle) -> None:
        started.append(handle)
        write_launched(store, Launched(start.attempt, start.backend, handle), at=clock())

    if request is None:
        request = build_request(
            record.spec,
            store.uri,
            ranks=start.ranks,
            attempt=start.attempt,
            world_size=start.world_size,
        )
    try:
        with import_path(record.directory), kept_fresh(store, start, at=clock()):
            handles = request.submit(executor.launch_replicas, record_handle)
        recorded = {handle.rank for handle in started}
        for handle in handles:  # an executor may know its handles only at the end
            if handle.rank not in recorded:
                record_handle(handle)
    except BaseException as error:  # Ctrl-C too must not leave billed replicas behind
        _roll_back(store, executor, started, start, error, clock())
        if isinstance(error, Exception) and not isinstance(error, DilocoError):
            raise LaunchError(
                f"backend {start.backend!r} failed to start the replicas: {error}",
                fix="What had been started was cancelled.",
            ) from error
        raise
    _cancel_unwanted(store, executor, started, start.attempt)


def _cancel_unwanted(
    store: ObjectStore,
    executor: ServerlessExecutor,
    started: Sequence[ReplicaHandle],
    attempt: int,
) -> None:
    """End what a user cancelled while it was being started, and had no handle to be ended by."""
    lives = read_lives(store)
    for handle in started:
        if "cancel" in lives.of(handle.rank, attempt):
            executor.cancel(handle)


def _roll_back(
    store: ObjectStore,
    executor: ServerlessExecutor,
    started: Sequence[ReplicaHandle],
    start: Start,
    cause: BaseException,
    now: float,
) -> None:
    """Cancel what was started and say in the prefix what happened; never raises."""
    for handle in started:
        try:
            executor.cancel(handle)
        except Exception:
            logger.exception("could not cancel replica %d after a failed launch", handle.rank)
    message = getattr(cause, "message", None) or str(cause) or type(cause).__name__
    for rank in start.ranks:
        values = {
            "rank": rank,
            "attempt": start.attempt,
            "state": "failed",
            "exit_code": None,
            "reason": "no_capacity" if _is_providers(cause) else None,
            "restartable": not isinstance(cause, UsageError),
            "error": f"the launch failed: {message}",
            "traceback": None,
            "result": None,
            "digest": None,
            "ended_at": now,
        }
        try:
            create_json(store, keys.outcome(rank, start.attempt), values)
        except Exception:
            logger.exception("could not record the failed launch of replica %d", rank)


def _is_providers(cause: BaseException) -> bool:
    """Whether a launch failed on the provider's side."""
    if isinstance(cause, DilocoError):
        return isinstance(cause, LaunchError)
    return isinstance(cause, Exception)


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
