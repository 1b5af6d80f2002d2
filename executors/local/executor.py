"""The local backend: replicas are detached processes of this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from diloco_cloud.errors import ConfigError, LaunchError
from diloco_cloud.executor import (
    TERM_GRACE_ENV,
    Entrypoint,
    LaunchOptions,
    ReplicaHandle,
    ReplicaResult,
    ReplicaStatus,
)
from diloco_cloud.executors.local import logs
from diloco_cloud.executors.local.environment import cuda_devices, replica_environment
from diloco_cloud.executors.local.launch import PreparedLaunch, prepare, spawn_runner
from diloco_cloud.executors.local.runner import is_alive
from diloco_cloud.executors.local.state import (
    BACKEND_NAME,
    LocalReplica,
    default_state_dir,
    recorded_handles,
)
from diloco_cloud.launch_request import LaunchRequest, check_launch
from diloco_cloud.secrets import revealed

logger = logging.getLogger(__name__)

#: Seconds between two looks at the replicas: at first, and at most.
_SHORTEST_WAIT: Final = 0.01
_LONGEST_WAIT: Final = 1.0
_NO_OPTIONS: Final = LaunchOptions()


class LocalProcessExecutor:
    """Runs replicas as processes that outlive the one that launched them.

    Args:
        state_dir: where replicas' logs and records are kept; default ``$DILOCO_HOME/local``, else
            ``$XDG_STATE_HOME/diloco-cloud/local``, else ``~/.local/state/diloco-cloud/local``.
        cpu_threads: for each replica's numerical libraries, unless the environment sets theirs.
        grace: seconds between SIGTERM and SIGKILL; replicas are told.
        clock: seconds from any origin, for ``collect``.
        sleep: waits that many seconds, for ``collect``.
    """

    backend_name: str = BACKEND_NAME
    supports_inter_replica_network: bool = True

    def __init__(
        self,
        *,
        state_dir: str | os.PathLike[str] | None = None,
        cpu_threads: int = 1,
        grace: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if cpu_threads < 1:
            raise ConfigError(f"cpu_threads is {cpu_threads}", fix="It must be at least 1.")
        self._state_dir = default_state_dir() if state_dir is None else Path(state_dir).absolute()
        self._cpu_threads = cpu_threads
        self._grace = grace
        self._clock = clock
        self._sleep = sleep

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
        """Start the replicas; see :meth:`ServerlessExecutor.launch_replicas`.

        The entrypoint may also be a callable, under the rules of multiprocessing's "spawn"
        method: defined at the top level of a module or script, with picklable arguments.
        """
        request = check_launch(
            n_replicas, entrypoint, entrypoint_args, options, timeout=timeout, callables=True
        )
        if gpu is not None:
            warnings.warn(
                f"gpu={gpu!r} has no effect: local replicas share the GPUs of this machine",
                stacklevel=2,
            )
        launch = prepare(
            request,
            name=options.name,
            state_dir=self._state_dir,
            timeout=timeout,
            grace=self._grace,
        )
        handles: list[ReplicaHandle] = []
        try:
            for rank in request.ranks:
                handles.append(self._start(launch, rank))
                if options.on_launched is not None:
                    options.on_launched(handles[-1])
        except BaseException:
            self._roll_back(handles)
            raise
        return handles

    def _start(self, launch: PreparedLaunch, rank: int) -> ReplicaHandle:
        try:
            replica = launch.start(rank, self._environment(launch.request, rank))
        except OSError as error:
            failure = LaunchError(f"replica {rank} did not start: {error}")
        except LaunchError as error:
            failure = LaunchError(error.message, fix=error.fix)
        else:
            logger.debug("replica %d is process %d; log in %s", rank, replica.pid, replica.log)
            return replica.handle(rank)
        raise failure  # made anew: frames of the other one hold the environment

    def _environment(self, request: LaunchRequest, rank: int) -> dict[str, str]:
        grace = {TERM_GRACE_ENV: f"{self._grace:g}"}
        return replica_environment(
            os.environ,
            {**request.environment(rank), **revealed(request.secrets), **grace},
            rank=rank,
            cpu_threads=self._cpu_threads,
            devices=cuda_devices(),
        )

    def _roll_back(self, handles: Sequence[ReplicaHandle]) -> None:
        for handle in handles:
            self.cancel(handle)
        self._wait(handles, timeout=self._grace + 5.0)

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """The replica's state now.

        "unknown" is a replica of another machine, or one whose records cannot be read.
        """
        replica = LocalReplica.of(handle)
        if replica is None:
            message = f"not a handle of the {BACKEND_NAME} backend"
            return ReplicaStatus("failed", reason="lost", message=message)
        try:
            return replica.status()
        except (OSError, ValueError) as error:
            return ReplicaStatus("unknown", message=f"its records cannot be read: {error}")

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """The last ``n_lines`` lines of stdout and stderr; "" where there is no log."""
        replica = LocalReplica.of(handle)
        return "" if replica is None else logs.tail(replica.log, n_lines)

    def read_logs(self, handle: ReplicaHandle, offset: int = 0) -> tuple[bytes, int]:
        """The next bytes of the log, at most 1 MiB, and the offset to go on from."""
        replica = LocalReplica.of(handle)
        return (b"", offset) if replica is None else logs.read_from(replica.log, offset)

    def cancel(self, handle: ReplicaHandle) -> None:
        """Ask the replica to stop: SIGTERM, and SIGKILL to its process group after the grace.

        The replica is then "cancelled", whatever its exit code, unless it had ended before.
        """
        replica = LocalReplica.of(handle)
        if replica is None or not replica.is_here or self.poll(handle).is_terminal:
            return
        with contextlib.suppress(
            OSError
        ):  # without state, or a full disk, it must stop all the same
            replica.path("cancel").touch()
        if _terminate(replica.runner_pid, replica.runner_start):
            return
        if is_alive(replica.pid, replica.pid_start):
            _stop_without_runner(replica)

    def recover(self, name: str) -> list[ReplicaHandle]:
        """Handles of every replica launched here as ``options.name``, ended ones too.

        For a launcher that died before it could record what it had started.
        """
        handles = recorded_handles(self._state_dir, name)
        return sorted(handles, key=lambda handle: (handle.metadata["start_ts"], handle.rank))

    def forget(self, handle: ReplicaHandle) -> None:
        """Delete the log and records of a replica that has ended."""
        replica = LocalReplica.of(handle)
        if replica is None or not self.poll(handle).is_terminal:
            return
        directory = Path(replica.directory)
        shutil.rmtree(directory, ignore_errors=True)
        if not any(path.is_dir() for path in directory.parent.glob("*")):
            shutil.rmtree(directory.parent, ignore_errors=True)

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None
    ) -> list[ReplicaResult]:
        """Wait for the replicas; see :meth:`ServerlessExecutor.collect`.

        A replica in state "unknown" is not waited for: it is on another machine.
        """
        statuses = self._wait(handles, timeout=timeout)
        return [
            _result(handle, status, timeout)
            for handle, status in zip(handles, statuses, strict=True)
        ]

    def _wait(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None
    ) -> list[ReplicaStatus]:
        """The state of each replica once none is running, or when the time is up."""
        deadline = float("inf") if timeout is None else self._clock() + timeout
        statuses = [self.poll(handle) for handle in handles]
        pause = _SHORTEST_WAIT
        while "running" in statuses and (left := deadline - self._clock()) > 0:
            self._sleep(min(pause, left))
            pause = min(pause * 1.5, _LONGEST_WAIT)
            statuses = [
                self.poll(handle) if status == "running" else status
                for handle, status in zip(handles, statuses, strict=True)
            ]
        return statuses


def _terminate(pid: int, token: str) -> bool:
    """Send SIGTERM to the process with this start token; whether there was one.

    Where the system has process descriptors, the pid cannot pass to another process in between.
    """
    try:
        if not hasattr(os, "pidfd_open"):
            alive = is_alive(pid, token)
            if alive:
                os.kill(pid, signal.SIGTERM)
            return alive
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        alive = is_alive(pid, token)
        if alive:
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        return alive
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def _stop_without_runner(replica: LocalReplica) -> None:
    try:
        spawn_runner("stop", Path(replica.directory))
    except (OSError, LaunchError):  # without its state, nothing can note how it ended
        with contextlib.suppress(ProcessLookupError):
            os.killpg(replica.pid, signal.SIGKILL)


def _result(handle: ReplicaHandle, status: ReplicaStatus, timeout: float | None) -> ReplicaResult:
    """What ``collect`` tells of one replica."""
    replica = LocalReplica.of(handle)
    result, error = None, None
    if status == "succeeded" and replica is not None:
        try:
            result = replica.result()
        except Exception as failure:  # unpickling runs the result's own code
            error = f"its result cannot be read: {type(failure).__name__}: {failure}"
    elif status == "cancelled":
        error = "cancelled"
    elif status == "running":
        error = f"still running after {timeout:g} seconds; it goes on"
    else:
        error = status.message
    if error is not None and replica is not None:
        error = f"{error} (log: {replica.log})"
    return ReplicaResult(
        rank=handle.rank,
        status=status,
        exit_code=status.exit_code,
        error=error,
        result=result,
    )
