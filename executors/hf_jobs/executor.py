"""The Hugging Face Jobs backend: each replica is one job."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from diloco_cloud.collecting import collect_replicas, one_by_one
from diloco_cloud.errors import LaunchError
from diloco_cloud.executor import (
    Entrypoint,
    InstalledExtras,
    LaunchOptions,
    ReplicaHandle,
    ReplicaResult,
    ReplicaStatus,
)
from diloco_cloud.executors.hf_jobs.hub import Hub, HubRefused, HubUnreachable, JobUnknown
from diloco_cloud.executors.hf_jobs.job_request import (
    DEFAULT_HARDWARE,
    DEFAULT_IMAGE,
    RUN_LABEL,
    JobRequest,
    Settings,
    build_requests,
)
from diloco_cloud.executors.hf_jobs.jobs import BACKEND_NAME, Job, Jobs, handle_of, is_replica
from diloco_cloud.executors.hf_jobs.launching import Launch, check_account
from diloco_cloud.executors.hf_jobs.logs import read_tail
from diloco_cloud.extras import extras_of
from diloco_cloud.launch_request import check_launch

logger = logging.getLogger(__name__)

_NO_OPTIONS: Final = LaunchOptions()


class HFJobsExecutor:
    """Runs replicas as Jobs of the Hugging Face Hub.

    Args:
        hardware: a flavor of the hub, such as "a10g-large"; a launch's ``gpu`` goes before it.
        image: of Docker Hub, another registry or a Space. Default: a Python image, into which this
            package is installed when a job starts.
        install: what ``pip`` installs before the replica starts; default: this package if ``image``
            is not given, else nothing.
        python: the interpreter in the image.
        namespace: user or organisation that owns and pays for the jobs; default: the token's owner.
        attempts: how often the hub itself starts a job that fails; the run's supervisor does that
            too, and learns from what happened.
        labels: put on every job, for your own bookkeeping.
        resource_group: id of one of the organisation's.
        grace: seconds between SIGTERM and SIGKILL that replicas count on. The hub documents none.
        endpoint: of the hub; default ``$HF_ENDPOINT``, else huggingface.co.
        refresh_s: seconds for which one answer of the hub serves all replicas of a run.
        request_timeout_s: seconds after which a request to the hub has failed.
        clock: seconds from any origin.
        sleep: waits for so many seconds.

    Raises:
        ConfigError: a setting that cannot work.
        MissingDependencyError: huggingface_hub is not installed.
    """

    backend_name: str = BACKEND_NAME
    supports_inter_replica_network: bool = False

    def __init__(
        self,
        *,
        hardware: str = DEFAULT_HARDWARE,
        image: str | None = None,
        install: str | None = None,
        python: str = "python",
        namespace: str | None = None,
        attempts: int = 1,
        labels: Mapping[str, str] | None = None,
        resource_group: str | None = None,
        grace: float = 10.0,
        endpoint: str | None = None,
        refresh_s: float = 1.0,
        request_timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings = Settings(
            hardware=hardware,
            image=image or DEFAULT_IMAGE,
            install=_this_package() if image is None and install is None else install,
            python=python,
            namespace=namespace,
            attempts=attempts,
            labels=labels or {},
            resource_group=resource_group,
            grace=grace,
            brings_own=image is not None or install is not None,
        )
        self._clock = clock
        self._sleep = sleep
        self._hub = Hub(endpoint, sleep=sleep, request_timeout_s=request_timeout_s)
        self._jobs = Jobs(lambda: self._hub, refresh_s, clock)

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: int = 3600,
        options: LaunchOptions = _NO_OPTIONS,
    ) -> list[ReplicaHandle]:
        """Start one job per replica; see :meth:`ServerlessExecutor.launch_replicas`."""
        launch_id = secrets.token_hex(8)
        call = (n_replicas, entrypoint, entrypoint_args, gpu, timeout, options)
        requests = self._requests(*call, launch_id=launch_id)
        namespace = check_account(self._hub, self._settings.namespace, requests[0].flavor)
        launch = Launch(self._hub, namespace, launch_id, options.name, self._sleep)
        try:
            for request in requests:
                handle = launch.start(request)
                if options.on_launched is not None:
                    options.on_launched(handle)
            launch.cancel_doubles()
        except BaseException:
            launch.roll_back()
            self._jobs.forget_answers()
            raise
        self._jobs.forget_answers()
        return launch.handles

    def installed_extras(self) -> InstalledExtras | None:
        """Those that ``pip`` installs; see :class:`diloco_cloud.executor.InstallsPackage`."""
        settings = self._settings
        plain = settings.image == DEFAULT_IMAGE and settings.install is not None
        names = extras_of(settings.install or "") if plain else None
        if names is None:
            return None
        return InstalledExtras(names, f"hf-jobs.install='{_this_package('{extras}')}'")

    def check_launch(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: int = 3600,
        options: LaunchOptions = _NO_OPTIONS,
    ) -> None:
        """Ask the hub about token, namespace and hardware; see :class:`ChecksLaunch`."""
        requests = self._requests(n_replicas, entrypoint, entrypoint_args, gpu, timeout, options)
        check_account(self._hub, self._settings.namespace, requests[0].flavor)

    def preview_launch(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: int = 3600,
        options: LaunchOptions = _NO_OPTIONS,
    ) -> list[dict[str, Any]]:
        """The calls of ``HfApi.run_job``; see :class:`PreviewsLaunch`."""
        requests = self._requests(n_replicas, entrypoint, entrypoint_args, gpu, timeout, options)
        return [request.preview(self._settings.namespace) for request in requests]

    def _requests(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        gpu: str | None,
        timeout: int,
        options: LaunchOptions,
        launch_id: str = "preview",
    ) -> list[JobRequest]:
        request = check_launch(n_replicas, entrypoint, entrypoint_args, options, timeout=timeout)
        return build_requests(
            request,
            self._settings,
            name=options.name,
            gpu=gpu,
            timeout=timeout,
            launch_id=launch_id,
        )

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """The job's stage; one request serves all replicas of a run that are polled together."""
        job = Job.of(handle)
        if job is None:
            message = f"not a handle of the {BACKEND_NAME} backend"
            return ReplicaStatus("failed", reason="lost", message=message)
        return self._jobs.status(job)

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """The end of what the job has written to stdout and stderr; "" where there is nothing.

        Takes about a second for a job that runs: the hub does not tell where its log ends.
        """
        job = Job.of(handle)
        if job is None or n_lines < 1:
            return ""

        def lines() -> Iterable[str]:
            # One more than asked for: the hub counts one of its own, which the client drops.
            return self._hub.logs(job.namespace, job.job_id, n_lines + 1)

        return read_tail(lines, n_lines, self._clock)

    def cancel(self, handle: ReplicaHandle) -> None:
        """Cancel the job.

        Raises:
            LaunchError: the hub does not answer, or refuses to; the job may go on, and cost money.
        """
        job = Job.of(handle)
        if job is None:
            return
        try:
            self._hub.cancel(job.namespace, job.job_id)
        except JobUnknown:
            return
        except (HubRefused, HubUnreachable) as error:
            self._jobs.forget_answers()
            if not self._jobs.status(job).is_terminal:
                raise LaunchError(
                    f"replica {handle.rank} could not be cancelled: {error}",
                    fix=f"Cancel it at {job.url}." if job.url else "Try again.",
                ) from None
        finally:
            self._jobs.forget_answers()

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None
    ) -> list[ReplicaResult]:
        """Wait for the jobs; see :meth:`ServerlessExecutor.collect`."""
        return collect_replicas(
            handles, one_by_one(self.poll), timeout=timeout, clock=self._clock, sleep=self._sleep
        )

    def recover(self, name: str) -> list[ReplicaHandle]:
        """Handles of all jobs of a run, oldest first; see :class:`RecoversReplicas`."""
        handles: list[ReplicaHandle] = []
        try:
            namespaces, surely = self._namespaces(name)
            for namespace in namespaces:
                found = self._hub.find_surely(namespace, {RUN_LABEL: name})
                ours = filter(is_replica, found)
                jobs = sorted(ours, key=lambda info: (str(info.created_at), info.id))
                handles += [handle_of(info, namespace, name) for info in jobs]
        except (HubRefused, HubUnreachable) as error:
            raise LaunchError(f"jobs of {name} cannot be looked for: {error}") from None
        if not handles and not surely:
            logger.warning(
                "%s, who owns the token here, has no jobs of %s. If it was launched with another's "
                "token: set HF_TOKEN to that one (or `hf auth login`), and try again.",
                ", ".join(namespaces),
                name,
            )
        return handles

    def _namespaces(self, name: str) -> tuple[list[str], bool]:
        """Whose the jobs of a run may be; and whether that is more than this machine's token."""
        if self._settings.namespace is not None:
            return [self._settings.namespace], True
        if seen := self._jobs.namespaces(name):  # by the handles of others of its replicas
            return seen, True
        return [str(self._hub.account()["name"])], False


def _this_package(extras: str = "diloco,s3") -> str:
    from diloco_cloud import __version__

    return f"diloco-cloud[{extras}]=={__version__}"
