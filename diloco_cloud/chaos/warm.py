"""Replicas as processes forked from one that has imported everything: a warm pool on a laptop."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from diloco_cloud.chaos.pool import ONE_THREAD, WarmPool
from diloco_cloud.chaos.records import BACKEND_NAME, WarmReplica
from diloco_cloud.collecting import collect_replicas, one_by_one
from diloco_cloud.entrypoints import Function
from diloco_cloud.errors import ConfigError, LaunchError
from diloco_cloud.executor import (
    TERM_GRACE_ENV,
    Entrypoint,
    LaunchOptions,
    ReplicaHandle,
    ReplicaResult,
    ReplicaStatus,
    Script,
)
from diloco_cloud.launch_request import LaunchRequest, check_launch
from diloco_cloud.secrets import revealed

logger = logging.getLogger(__name__)

#: What replicas of this package import, and the trainer of a rehearsal.
PRELOAD: Final = (
    "torch._dynamo",  # every optimizer loads it when it is made
    "torchft.local_sgd",
    "diloco_cloud.exchange.allreduce",
    "diloco_cloud.outer.loop",
    "diloco_cloud.replica.launched",
    "diloco_cloud.replica.roster",
    "diloco_cloud.replica_entrypoint",
    "diloco_cloud.store.faults",
    "diloco_cloud.chaos.trainer",
)
_NO_OPTIONS: Final = LaunchOptions()


class WarmProcessExecutor:
    """Runs replicas as children of a warm process; a context manager that leaves none behind.

    For rehearsals of many small replicas on one Linux machine: they share the memory of what was
    imported, start in a tenth of a second, and end with this executor. What forks badly they
    cannot use: accelerators, and stores with threads of their own (``s3://`` and its like).

    Args:
        state_dir: where replicas' logs and records are kept.
        preload: modules to import once.
        grace: seconds between SIGTERM and SIGKILL.
        start_s: seconds that a replica is made to take to start, as elsewhere it would.
    """

    backend_name: str = BACKEND_NAME
    supports_inter_replica_network: bool = True

    def __init__(
        self,
        state_dir: str | os.PathLike[str],
        *,
        preload: Sequence[str] = PRELOAD,
        grace: float = 10.0,
        start_s: float = 0.0,
    ) -> None:
        if sys.platform != "linux":
            raise ConfigError("warm processes need Linux", fix="Use the backend local.")
        self._state_dir = Path(state_dir).absolute()
        self._preload = preload
        self._grace = grace
        self._start_s = start_s
        self._lock = threading.Lock()
        self._pool: WarmPool | None = None
        self._newest: dict[tuple[str, int], WarmReplica] = {}

    def __enter__(self) -> WarmProcessExecutor:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill every replica that this object has started."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None

    def warm_up(self) -> None:
        """Start the zygote, which a first launch would do otherwise."""
        with self._lock:
            self._warm()

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float = 3600,
        options: LaunchOptions = _NO_OPTIONS,
    ) -> list[ReplicaHandle]:
        """Start the replicas; see :meth:`ServerlessExecutor.launch_replicas`."""
        request = check_launch(n_replicas, entrypoint, entrypoint_args, options, timeout=timeout)
        if gpu is not None:
            warnings.warn(f"gpu={gpu!r} has no effect on warm processes", stacklevel=2)
        handles: list[ReplicaHandle] = []
        try:
            launch = self._make_directory(options.name)
            for rank in request.ranks:
                replica = self._start(launch, request, rank, timeout)
                self._newest[options.name, rank] = replica
                handles.append(replica.handle(rank))
                if options.on_launched is not None:
                    options.on_launched(handles[-1])
        except BaseException:
            for handle in handles:
                self.cancel(handle)
            raise
        return handles

    def _make_directory(self, name: str) -> Path:
        try:
            self._state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._state_dir))
        except OSError as error:
            raise LaunchError(f"{self._state_dir} cannot be written: {error}") from error

    def _start(
        self, launch: Path, request: LaunchRequest, rank: int, timeout: float
    ) -> WarmReplica:
        directory = launch / f"{rank}.{request.attempt}"
        directory.mkdir(mode=0o700)
        environment = {
            **os.environ,
            **ONE_THREAD,
            **request.environment(rank),
            **revealed(request.secrets),
            TERM_GRACE_ENV: f"{self._grace:g}",
        }
        order = {
            "directory": str(directory),
            "cwd": os.getcwd(),
            "sys_path": [os.path.abspath(entry) for entry in sys.path],
            "environment": environment,
            "timeout": timeout,
            "start_s": self._start_s,
            **_program(request),
        }
        with self._lock:
            pool = self._warm()
            pid = pool.start(order)
        logger.debug("replica %d is process %d; log in %s", rank, pid, directory)
        return WarmReplica(str(directory), pool.lock, pool.pid, pid, request.attempt)

    def _warm(self) -> WarmPool:
        if self._pool is None or not self._pool.is_alive:
            self._state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._pool = WarmPool(self._state_dir, self._preload, self._grace)
        return self._pool

    def running(self, name: str, rank: int) -> WarmReplica | None:
        """A rank's newest life, if it runs and this object has started it.

        Args:
            name: ``options.name`` of its launch.
            rank: of the replica.
        """
        replica = self._newest.get((name, rank))
        return replica if replica is not None and replica.status() == "running" else None

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """The replica's state now."""
        replica = WarmReplica.of(handle)
        if replica is None:
            message = f"not a handle of the {BACKEND_NAME} backend"
            return ReplicaStatus("failed", reason="lost", message=message)
        try:
            return replica.status()
        except (OSError, ValueError) as error:
            return ReplicaStatus("unknown", message=f"its records cannot be read: {error}")

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """The last ``n_lines`` lines of stdout and stderr; "" where there is no log."""
        replica = WarmReplica.of(handle)
        return "" if replica is None else replica.log(n_lines)

    def cancel(self, handle: ReplicaHandle) -> None:
        """Ask the replica to stop: SIGTERM to its process group, SIGKILL after the grace period."""
        replica = WarmReplica.of(handle)
        if replica is not None:
            with suppress(OSError):  # its records were deleted: it ended long ago
                replica.cancel()

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None
    ) -> list[ReplicaResult]:
        """Wait for the replicas; see :meth:`ServerlessExecutor.collect`."""
        return collect_replicas(handles, one_by_one(self.poll), timeout=timeout, result=_returned)


def _program(request: LaunchRequest) -> dict[str, Any]:
    """The part of an order that says what to run."""
    target = request.target
    if isinstance(target, Script):
        return {"script": os.path.abspath(target.path), "args": list(target.args)}
    assert isinstance(target, Function)  # check_launch lets callables in only where asked to
    return {"module": target.module, "function": target.name, "arguments": request.arguments}


def _returned(handle: ReplicaHandle) -> Any:
    """What the entrypoint of a replica that has succeeded returned."""
    replica = WarmReplica.of(handle)
    return None if replica is None else replica.outcome().get("result")
