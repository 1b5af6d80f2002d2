"""The Slurm backend: replicas are tasks of a job array."""

from __future__ import annotations

import os
import posixpath
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from diloco_cloud.collecting import collect_replicas, one_by_one
from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import (
    Entrypoint,
    LaunchOptions,
    ReplicaHandle,
    ReplicaResult,
    ReplicaStatus,
)
from diloco_cloud.executors.slurm import cluster, submitting
from diloco_cloud.executors.slurm.commands import CommandError, Run, over_ssh, run_here
from diloco_cloud.executors.slurm.queue import Queue
from diloco_cloud.executors.slurm.replica import BACKEND_NAME, SlurmReplica
from diloco_cloud.executors.slurm.states import (
    REPORT,
    Evidence,
    ended,
    forgotten,
    going,
    parse_evidence,
)
from diloco_cloud.executors.slurm.submission import Settings, Submission, build
from diloco_cloud.launch_request import check_launch

_NO_OPTIONS: Final = LaunchOptions()


class SlurmExecutor:
    """Runs replicas as one job array per launch, one task per replica; needs no accounting.

    Args:
        host: login node whose Slurm to use, by ssh; default: this machine's commands.
        directory: for logs and records, on a disk that login and compute nodes share; default
            ``$DILOCO_HOME/slurm``, else ``~/.local/state/diloco-cloud/slurm``. With ``host``, a
            path there.
        python: the interpreter of the replicas; default: this one, or with ``host`` python3.
        setup: shell lines that each replica runs first, such as ``module load cuda``.
        workdir: where replicas run; default: the working directory of sbatch.
        partition, account, qos: as sbatch takes them; default: the cluster's.
        cpus: per replica; default: the cluster's.
        memory: per replica, such as "64G"; default: the cluster's.
        sbatch: more options of sbatch.
        requeue: whether Slurm starts a replica again that was preempted or lost its node.
        grace: seconds between SIGTERM and SIGKILL; default: the cluster's KillWait.
        refresh_s: seconds for which one answer of squeue serves all replicas of a run.
        run: runs a command.
        clock: seconds from any origin.
        sleep: waits that many seconds.
    """

    backend_name: str = BACKEND_NAME
    supports_inter_replica_network: bool = True

    def __init__(
        self,
        *,
        host: str | None = None,
        directory: str | None = None,
        python: str | None = None,
        setup: str = "",
        workdir: str | None = None,
        partition: str | None = None,
        account: str | None = None,
        qos: str | None = None,
        cpus: int | None = None,
        memory: str | int | None = None,
        sbatch: Sequence[str] = (),
        requeue: bool = True,
        grace: float | None = None,
        refresh_s: float = 1.0,
        run: Callable[[Sequence[str], str], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        _check_settings(host, directory, cpus, sbatch)
        here: Run = run_here if run is None else run
        self._run = here if host is None else over_ssh(host, here)
        self._settings = Settings(
            directory=(directory or (_default_directory() if host is None else "")).rstrip("/"),
            partition=partition,
            account=account,
            qos=qos,
            cpus=cpus,
            memory=None if memory is None else str(memory),
            sbatch=tuple(sbatch),
            setup=setup,
            workdir=workdir,
            python=python or (sys.executable if host is None else "python3"),
            requeue=requeue,
            shares_disk=host is None,
        )
        self._grace = grace
        self._clock = clock
        self._sleep = sleep
        self._queue = Queue(self._run, clock, refresh_s)

    # -- launching -----------------------------------------------------------------------------

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
        """Submit one job array; see :meth:`ServerlessExecutor.launch_replicas`.

        A launch that is repeated, under the name of a run, finds the jobs of the first time.
        """
        request = (n_replicas, entrypoint, entrypoint_args)
        submission = self._build(*request, gpu=gpu, timeout=timeout, options=options, ask=True)
        cluster.check_time_limit(self._run, self._settings.partition, timeout)
        replicas = submitting.submit(self._run, submission, sleep=self._sleep)
        self._queue.forget_answer()
        handles = [replica.handle() for replica in replicas]
        try:
            for handle in handles:
                if options.on_launched is not None:
                    options.on_launched(handle)
        except BaseException:
            for handle in handles:
                self.cancel(handle)
            raise
        return handles

    def check_launch(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float = 3600,
        options: LaunchOptions = _NO_OPTIONS,
    ) -> None:
        """Let Slurm judge a launch without making it; see :class:`ChecksLaunch`."""
        request = (n_replicas, entrypoint, entrypoint_args)
        submission = self._build(*request, gpu=gpu, timeout=timeout, options=options, ask=True)
        cluster.rehearse(self._run, submission)
        cluster.check_time_limit(self._run, self._settings.partition, timeout)

    def preview_launch(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float = 3600,
        options: LaunchOptions = _NO_OPTIONS,
    ) -> list[dict[str, Any]]:
        """The sbatch command and its script; see :class:`PreviewsLaunch`."""
        request = (n_replicas, entrypoint, entrypoint_args)
        submission = self._build(*request, gpu=gpu, timeout=timeout, options=options, ask=False)
        return [submission.to_json()]

    def _build(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None,
        timeout: float,
        options: LaunchOptions,
        ask: bool,
    ) -> Submission:
        """The submission; ``ask`` the cluster what only it can tell."""
        request = check_launch(n_replicas, entrypoint, entrypoint_args, options, timeout=timeout)
        # Launches that were given no name are not each other's repetitions.
        unnamed = ask and options.name == _NO_OPTIONS.name
        name = f"{options.name}-{uuid.uuid4().hex[:8]}" if unnamed else options.name
        return build(
            request,
            self._settings,
            name=name,
            gpu=gpu,
            timeout=timeout,
            grace=self._term_grace(ask),
        )

    def _term_grace(self, ask: bool) -> float:
        if self._grace is None and ask:
            self._grace = cluster.kill_wait(self._run)
        return cluster.DEFAULT_GRACE_S if self._grace is None else self._grace

    # -- following -----------------------------------------------------------------------------

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """The replica's state now, by squeue; by its own record where Slurm has forgotten it."""
        replica = SlurmReplica.of(handle)
        if replica is None:
            message = f"not a handle of the {BACKEND_NAME} backend"
            return ReplicaStatus("failed", reason="lost", message=message)
        try:
            job = self._queue.look(replica.job, replica.task)
            if job is not None and job.name != replica.job_name:
                job = None  # another one's, which Slurm has given the same number
            if job is not None and not job.has_ended:
                return going(job)
            evidence = self._evidence(replica)
        except CommandError as error:
            return ReplicaStatus("unknown", message=str(error))
        return forgotten(evidence) if job is None else ended(job, evidence)

    def _evidence(self, replica: SlurmReplica) -> Evidence:
        done = self._run(["sh", "-c", REPORT, "sh", replica.directory], "")
        return parse_evidence(done.out)

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """The last ``n_lines`` lines of stdout and stderr; "" where there is no log."""
        replica = SlurmReplica.of(handle)
        if replica is None or n_lines < 1:
            return ""
        try:
            return self._run(["tail", "-n", str(n_lines), self._log(replica)], "").out
        except CommandError:
            return ""

    def read_logs(self, handle: ReplicaHandle, offset: int = 0) -> tuple[bytes, int]:
        """The next bytes of the log, and the offset to go on from."""
        replica = SlurmReplica.of(handle)
        if replica is None:
            return b"", offset
        try:
            text = self._run(["tail", "-c", f"+{offset + 1}", self._log(replica)], "").out
        except CommandError:
            return b"", offset
        data = text.encode()
        return data, offset + len(data)

    def _log(self, replica: SlurmReplica) -> str:
        return posixpath.join(replica.directory, "log.txt")

    def cancel(self, handle: ReplicaHandle) -> None:
        """Cancel the replica's task: SIGTERM now, SIGKILL after the cluster's KillWait.

        Raises:
            LaunchError: Slurm cannot be asked to.
        """
        replica = SlurmReplica.of(handle)
        if replica is None or self.poll(handle).is_terminal:
            return
        submitting.cancel(self._run, replica)
        self._queue.forget_answer()

    def recover(self, name: str) -> list[ReplicaHandle]:
        """Handles of every replica launched as ``options.name``, ended ones too.

        Raises:
            LaunchError: Slurm cannot be asked.
        """
        base = f"{self._settings.directory}/{name}"
        return [replica.handle() for replica in submitting.recorded(self._run, base, name)]

    def forget(self, handle: ReplicaHandle) -> None:
        """Delete the log and records of a replica that has ended."""
        replica = SlurmReplica.of(handle)
        if replica is None or not self.poll(handle).is_terminal:
            return
        script = 'rm -rf -- "$1" && rmdir -- "$2" 2>/dev/null; true'
        base = posixpath.dirname(replica.directory)
        self._run(["sh", "-c", script, "sh", replica.directory, base], "")

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None
    ) -> list[ReplicaResult]:
        """Wait for the replicas; see :meth:`ServerlessExecutor.collect`."""
        return collect_replicas(
            handles, one_by_one(self.poll), timeout=timeout, clock=self._clock, sleep=self._sleep
        )


def _check_settings(
    host: str | None, directory: str | None, cpus: int | None, sbatch: Sequence[str]
) -> None:
    if host is not None and directory is None:
        raise ConfigError(
            "a cluster reached by ssh needs a directory for its replicas' logs",
            fix="Add --backend-arg directory=/path/that/all/nodes/share.",
        )
    if directory is not None and not posixpath.isabs(directory):
        raise ConfigError(f"directory is {directory!r}", fix="It must be an absolute path.")
    if cpus is not None and cpus < 1:
        raise ConfigError(f"cpus is {cpus}", fix="It must be at least 1.")
    if isinstance(sbatch, str) or not all(option.startswith("-") for option in sbatch):
        raise ConfigError(
            f"sbatch is {sbatch!r}",
            fix="""Give a list of options: --backend-arg 'sbatch=["--constraint=a100"]'.""",
        )


def _default_directory() -> str:
    """Below the home directory, which clusters share."""
    home = os.environ.get("DILOCO_HOME")
    if home:
        return str(Path(home, "slurm").absolute())
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return str(Path(state, "diloco-cloud", "slurm").absolute())
