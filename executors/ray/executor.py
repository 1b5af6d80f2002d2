"""The Ray backend: replicas are jobs of a cluster that is already there."""

from __future__ import annotations

import logging
import posixpath
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from diloco_cloud.collecting import collect_replicas, one_by_one
from diloco_cloud.errors import ConfigError, LaunchError
from diloco_cloud.executor import (
    Entrypoint,
    LaunchOptions,
    ReplicaHandle,
    ReplicaResult,
    ReplicaStatus,
)
from diloco_cloud.executors.ray.api import JobsApi, RefusedError, UnreachableError, find_address
from diloco_cloud.executors.ray.jobs import Jobs
from diloco_cloud.executors.ray.states import status_of
from diloco_cloud.executors.ray.submission import (
    RANK_KEY,
    RUN_KEY,
    Settings,
    Submission,
    build,
    parse_gpu,
    secrets_file,
)
from diloco_cloud.executors.ray.submitting import left_secrets, not_asked, submit, withdraw
from diloco_cloud.launch_request import LaunchRequest, check_launch
from diloco_cloud.secrets import Secret

logger = logging.getLogger(__name__)

BACKEND_NAME: Final = "ray"
_NO_OPTIONS: Final = LaunchOptions()
#: Seconds that pass at most between the writing of secrets and the submission of their job, with
#: what the clocks of two machines may differ by.
_MARGIN_S: Final = 120.0


class RayJobsExecutor:
    """Runs each replica as a job of a Ray cluster, by its REST API.

    Args:
        address: of the dashboard; default: ``$RAY_API_SERVER_ADDRESS``, else
            http://127.0.0.1:8265. A token comes from ``$RAY_AUTH_TOKEN``, other headers from
            ``$RAY_JOB_HEADERS``.
        python: the interpreter of the replicas, where diloco-cloud is installed.
        cpus: per replica.
        resources: custom ones, per replica.
        runtime_env: as Ray takes it; a ``working_dir`` is a URI that the nodes reach.
        secrets_dir: a directory on a disk that this machine and the nodes share; secrets travel by
            it, in files that only this user can read.
        cluster_secrets: names of secrets that the nodes have in their environment already.
        grace: seconds between SIGTERM and SIGKILL.
        refresh_s: seconds for which one answer of the cluster serves all replicas of a run.
        clock: seconds from any origin.
        sleep: waits that many seconds.
    """

    backend_name: str = BACKEND_NAME
    supports_inter_replica_network: bool = True

    def __init__(
        self,
        *,
        address: str | None = None,
        python: str = "python",
        cpus: float = 1.0,
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        secrets_dir: str | None = None,
        cluster_secrets: Sequence[str] = (),
        grace: float = 30.0,
        refresh_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        _check_settings(cpus, secrets_dir, cluster_secrets)
        self._api = JobsApi(find_address(address))
        self._is_address_given = address is not None  # and so in the record of a run
        self._settings = Settings(
            python=python,
            cpus=cpus,
            resources=dict(resources or {}),
            runtime_env=dict(runtime_env or {}),
            secrets_dir=secrets_dir,
            cluster_secrets=tuple(cluster_secrets),
            grace=grace,
        )
        self._clock = clock
        self._sleep = sleep
        self._jobs = Jobs(self._api, clock, refresh_s)

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
        """Submit a job per replica; see :meth:`ServerlessExecutor.launch_replicas`.

        A launch that is repeated, under the name of a run, finds the jobs of the first time.
        """
        request = check_launch(n_replicas, entrypoint, entrypoint_args, options, timeout=timeout)
        # Launches that were given no name are not each other's repetitions.
        unnamed = options.name == _NO_OPTIONS.name
        name = f"{options.name}-{uuid.uuid4().hex[:8]}" if unnamed else options.name
        submissions = build(request, self._settings, name=name, gpu=gpu, timeout=timeout)
        handles: list[ReplicaHandle] = []
        begun: list[str] = []
        try:
            for submission in submissions:
                begun.append(submission.submission_id)
                submit(self._api, submission, self._sent(request), sleep=self._sleep)
                handles.append(self._handle(submission))
                if options.on_launched is not None:
                    options.on_launched(handles[-1])
        except BaseException:
            self._roll_back(begun)
            raise
        finally:
            self._jobs.forget_answer()
        return handles

    def _sent(self, request: LaunchRequest) -> dict[str, Secret]:
        """Secrets that the nodes do not have yet."""
        kept = self._settings.cluster_secrets
        return {name: secret for name, secret in request.secrets.items() if name not in kept}

    def _handle(self, submission: Submission) -> ReplicaHandle:
        return ReplicaHandle(
            submission.rank, BACKEND_NAME, {"submission_id": submission.submission_id}
        )

    def _roll_back(self, submission_ids: Sequence[str]) -> None:
        """Stop what was started; also the last, of which it is not known."""
        for submission_id in submission_ids:
            try:
                self._api.stop(submission_id)
            except (UnreachableError, RefusedError) as error:
                logger.error("job %s could not be stopped: %s", submission_id, error)
            withdraw(secrets_file(self._settings, submission_id))

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
        """Ask the cluster whether it has such nodes at all; see :class:`ChecksLaunch`."""
        wanted = parse_gpu(gpu)
        try:
            nodes, may_grow = self._api.nodes()
        except UnreachableError as error:
            raise not_asked(error) from None
        except (RefusedError, KeyError, TypeError, ValueError):
            return  # a cluster that does not tell: the launch will say so
        needs = {"CPU": self._settings.cpus, "GPU": wanted.count, **self._settings.resources}
        if wanted.resource is not None:
            needs[wanted.resource] = 0.001
        if nodes and not may_grow:
            _check_nodes(nodes, {name: amount for name, amount in needs.items() if amount})

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
        """The body of each POST to ``/api/jobs/``; see :class:`PreviewsLaunch`."""
        request = check_launch(n_replicas, entrypoint, entrypoint_args, options, timeout=timeout)
        jobs = build(request, self._settings, name=options.name, gpu=gpu, timeout=timeout)
        return [job.body for job in jobs]

    # -- following -----------------------------------------------------------------------------

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """The replica's state now, by the cluster's list of jobs."""
        submission_id = _submission_id(handle)
        if submission_id is None:
            message = f"not a handle of the {BACKEND_NAME} backend"
            return ReplicaStatus("failed", reason="lost", message=message)
        try:
            job = self._jobs.look(submission_id)
        except (UnreachableError, RefusedError, ConfigError) as error:
            return ReplicaStatus("unknown", message=str(error))
        if job is None:
            message = "the Ray cluster does not know it: it was deleted, or the head was replaced"
            return ReplicaStatus("failed", reason="lost", message=message)
        return status_of(job)

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """The last ``n_lines`` lines of stdout and stderr; "" where there is no log."""
        submission_id = _submission_id(handle)
        if submission_id is None or n_lines < 1:
            return ""
        try:
            text = self._api.logs(submission_id)
        except (UnreachableError, RefusedError, ConfigError):  # its node may be gone
            return ""
        return "".join(text.splitlines(keepends=True)[-n_lines:])

    def cancel(self, handle: ReplicaHandle) -> None:
        """Stop the replica's job: SIGTERM, and SIGKILL after the grace.

        A job that still waits for resources ends only when it gets them, or when Ray gives up.

        Raises:
            LaunchError: the cluster cannot be asked to.
        """
        submission_id = _submission_id(handle)
        if submission_id is None or self.poll(handle).is_terminal:
            return
        try:
            self._api.stop(submission_id)
        except (UnreachableError, RefusedError) as error:
            raise LaunchError(
                f"Ray cannot be asked to stop a job: {error}", fix="Try again when it is back."
            ) from None
        self._jobs.forget_answer()
        withdraw(secrets_file(self._settings, submission_id))  # it may not have begun

    def forget(self, handle: ReplicaHandle) -> None:
        """Delete the secrets of a replica that has ended before it could take them."""
        submission_id = _submission_id(handle)
        if submission_id is not None:
            withdraw(secrets_file(self._settings, submission_id))

    def release(self, name: str) -> None:
        """Delete the secrets that replicas of a run have not taken; see :class:`ReleasesRun`.

        They stay while a job that could take them waits, and while a launch of a moment ago may
        not have submitted it yet.
        """
        left = left_secrets(self._settings.secrets_dir, name)
        if not left:
            return
        try:
            jobs = self._api.jobs()
        except (UnreachableError, RefusedError, ConfigError) as error:
            logger.warning("secrets of %s are left, as Ray cannot be asked: %s", name, error)
            return
        for file in left:
            job = jobs.get(file.submission_id)
            over = file.age_s > _MARGIN_S if job is None else status_of(job).is_terminal
            if over:
                withdraw(file.path)

    def recover(self, name: str) -> list[ReplicaHandle]:
        """Handles of every replica launched as ``options.name`` that the cluster remembers.

        Raises:
            LaunchError: the cluster cannot be asked.
        """
        try:
            jobs = self._api.jobs()
        except (UnreachableError, RefusedError) as error:
            raise LaunchError(
                f"Ray cannot be asked: {error}", fix="Try again when it is back."
            ) from None
        ours = [
            (job.get("start_time") or 0, int(job["metadata"][RANK_KEY]), submission_id)
            for submission_id, job in jobs.items()
            if (job.get("metadata") or {}).get(RUN_KEY) == name
        ]
        if not ours and not self._is_address_given:
            logger.warning(
                "Ray at %s remembers no job of %s. If it was launched on another cluster: set "
                "RAY_API_SERVER_ADDRESS to that one's, and try again.",
                self._api.address,
                name,
            )
        return [
            ReplicaHandle(rank, BACKEND_NAME, {"submission_id": submission_id})
            for _, rank, submission_id in sorted(ours)
        ]

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None
    ) -> list[ReplicaResult]:
        """Wait for the replicas; see :meth:`ServerlessExecutor.collect`."""
        return collect_replicas(
            handles, one_by_one(self.poll), timeout=timeout, clock=self._clock, sleep=self._sleep
        )


def _check_nodes(nodes: Sequence[Mapping[str, float]], needs: Mapping[str, float]) -> None:
    """Refuse a replica that fits on none of the nodes there are: its job would wait in vain."""
    if any(all(node.get(name, 0) >= needs[name] for name in needs) for node in nodes):
        return
    hidden = ("node:", "memory", "object_store_memory")
    shown = [
        " ".join(f"{name}={node[name]:g}" for name in sorted(node) if not name.startswith(hidden))
        for node in nodes
    ]
    asked = " ".join(f"{name}={needs[name]:g}" for name in sorted(needs))
    raise ConfigError(
        f"a replica needs {asked}, which no node of this Ray cluster has",
        fix=f"Ask for less, or add nodes. There are: {'; '.join(dict.fromkeys(shown))}.",
    )


def _submission_id(handle: ReplicaHandle) -> str | None:
    """Of a handle's job; None if this executor did not make the handle."""
    found = handle.metadata.get("submission_id")
    return found if handle.backend_name == BACKEND_NAME and isinstance(found, str) else None


def _check_settings(cpus: float, secrets_dir: str | None, cluster_secrets: Sequence[str]) -> None:
    if not cpus > 0:
        raise ConfigError(
            f"cpus is {cpus}", fix="It must be positive: jobs without any run on the head node."
        )
    if secrets_dir is not None and not posixpath.isabs(secrets_dir):
        raise ConfigError(f"secrets_dir is {secrets_dir!r}", fix="It must be an absolute path.")
    if isinstance(cluster_secrets, str):
        raise ConfigError(
            f"cluster_secrets is {cluster_secrets!r}",
            fix="""Give a list of names: --backend-arg 'cluster_secrets=["HF_TOKEN"]'.""",
        )
