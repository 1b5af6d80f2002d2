"""The SageMaker backend: every replica is a training job of its own, on one instance."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from diloco_cloud.collecting import collect_replicas, one_by_one
from diloco_cloud.errors import ConfigError, DilocoError
from diloco_cloud.executor import (
    Entrypoint,
    InstalledExtras,
    LaunchOptions,
    ReplicaHandle,
    ReplicaResult,
    ReplicaStatus,
)
from diloco_cloud.executors.sagemaker import logs, secrets
from diloco_cloud.executors.sagemaker.board import NOTHING_THERE, JobBoard
from diloco_cloud.executors.sagemaker.clients import Clients, require_sdk
from diloco_cloud.executors.sagemaker.faults import (
    code_of,
    is_denied,
    is_unknown_job,
    message_of,
    translated,
)
from diloco_cloud.executors.sagemaker.jobs import BACKEND_NAME, Job
from diloco_cloud.executors.sagemaker.launching import start_jobs
from diloco_cloud.executors.sagemaker.planning import Plan, plan_launch
from diloco_cloud.executors.sagemaker.roles import account_text, caller_account, check_role
from diloco_cloud.executors.sagemaker.settings import Settings
from diloco_cloud.executors.sagemaker.usage import Usage, usage_of
from diloco_cloud.launch_request import check_launch

logger = logging.getLogger(__name__)

#: Seconds that CloudWatch may be behind what a replica has printed.
_LOG_DELAY_S: Final = 5.0
#: Seconds that pass at most between a look at a run and what is done about its end, and between the
#: keeping of secrets and the first job that needs them.
_MARGIN_S: Final = 120.0
_NO_OPTIONS: Final = LaunchOptions()


class SageMakerExecutor:
    """Runs replicas as training jobs, which need no launcher once they are created.

    Credentials are boto3's: the environment, profiles, SSO. Replicas have those of ``role``.

    Args:
        role: ARN of the execution role; needed to launch.
        image: in Amazon ECR, with this package installed; default: AWS's PyTorch training
            container, which the SageMaker SDK finds and which installs ``package`` as it starts.
        instance_type: "ml.g5.xlarge", "H100", "A10G:4", or several in order of preference; a
            launch's own ``gpu`` goes before it.
        region: of AWS; default: the environment's or the profile's.
        profile: of ``~/.aws``.
        spot: whether to run on spot instances; one that is taken back is replaced by SageMaker.
        spot_wait: seconds to wait for spot capacity, besides the time limit.
        keep_alive: seconds to keep an instance warm, and pay for it, after its job.
        retries: of a job that SageMaker itself has failed; the time limit is then for all tries.
        volume_gb: disk, where the instance has none of its own.
        output_uri: where SageMaker may write; default: "sagemaker/" in the bucket of the run.
        checkpoint_uri: where the contents of /opt/ml/checkpoints are kept, per rank.
        subnets, security_groups: of a VPC to run in.
        tags: of the jobs, besides those that name run, rank and attempt.
        source_dir: a folder to upload, which replicas import from.
        pytorch: version of AWS's container.
        package: what pip installs in it; default: this version of this package.
        request: fields to put into every CreateTrainingJob request, as AWS names them.
        refresh_s: seconds for which one answer of SageMaker serves all replicas of a run.
        clock: seconds from any origin.
        sleep: waits that many seconds.

    Raises:
        MissingDependencyError: boto3 is not installed.
        ConfigError: a setting that cannot work.
    """

    backend_name: str = BACKEND_NAME
    supports_inter_replica_network: bool = False

    def __init__(
        self,
        *,
        role: str | None = None,
        image: str | None = None,
        instance_type: str = "ml.g5.xlarge",
        region: str | None = None,
        profile: str | None = None,
        spot: bool = False,
        spot_wait: int = 86_400,
        keep_alive: int = 0,
        retries: int = 0,
        volume_gb: int = 100,
        output_uri: str | None = None,
        checkpoint_uri: str | None = None,
        subnets: str | Sequence[str] = (),
        security_groups: str | Sequence[str] = (),
        tags: Mapping[str, str] | None = None,
        source_dir: str | None = None,
        pytorch: str = "2.10",
        package: str | None = None,
        request: Mapping[str, Any] | None = None,
        refresh_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        require_sdk()
        self._settings = Settings.check(
            role=role,
            image=image,
            instance_type=instance_type,
            region=region,
            spot=spot,
            spot_wait=spot_wait,
            keep_alive=keep_alive,
            retries=retries,
            volume_gb=volume_gb,
            output_uri=output_uri,
            checkpoint_uri=checkpoint_uri,
            subnets=subnets,
            security_groups=security_groups,
            tags=tags or {},
            source_dir=source_dir,
            pytorch=pytorch,
            package=package,
            request=request or {},
        )
        self._clients = Clients(profile)
        self._board = JobBoard(self._clients, clock, refresh_s)
        self._clock = clock
        self._sleep = sleep

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
        """Start the replicas; see :meth:`ServerlessExecutor.launch_replicas`.

        A job that exists already under the name of this run, rank and attempt, with the same
        definition, and that is going on, is taken for the one that was to be created: AWS may have
        created it and its answer have been lost.
        """
        plan = self._plan(
            n_replicas, entrypoint, entrypoint_args, gpu=gpu, timeout=timeout, options=options
        )
        return start_jobs(self._clients, plan, options.on_launched)

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
        """The requests that such a launch would send; see :class:`PreviewsLaunch`."""
        plan = self._plan(
            n_replicas, entrypoint, entrypoint_args, gpu=gpu, timeout=timeout, options=options
        )
        return plan.preview()

    def installed_extras(self) -> InstalledExtras | None:
        """Those put into AWS's container; see :class:`diloco_cloud.executor.InstallsPackage`."""
        return self._settings.installed_extras()

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
        """Ask AWS for credentials and role, which costs nothing; see :class:`ChecksLaunch`."""
        plan = self._plan(
            n_replicas, entrypoint, entrypoint_args, gpu=gpu, timeout=timeout, options=options
        )
        self._clients.require_credentials()
        check_role(self._clients, plan.launch.region, plan.launch.role)

    def _plan(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None,
        timeout: float,
        options: LaunchOptions,
    ) -> Plan:
        request = check_launch(n_replicas, entrypoint, entrypoint_args, options, timeout=timeout)
        region = self._settings.region or self._clients.region()
        return plan_launch(
            request, self._settings, options, region=region, gpu=gpu, timeout=timeout
        )

    # -- one replica ---------------------------------------------------------------------------

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """The replica's state now; "unknown" while AWS does not answer."""
        job = Job.of(handle)
        if job is None:
            message = f"not a handle of the {BACKEND_NAME} backend"
            return ReplicaStatus("failed", reason="lost", message=message)
        try:
            return self._board.status(job)
        except DilocoError as error:
            return ReplicaStatus("unknown", message=error.message)
        except Exception as error:  # botocore has no one base of its errors
            if is_unknown_job(error):
                return self._missing(job)
            return ReplicaStatus("unknown", message=f"{message_of(error)} ({code_of(error)})")

    def _missing(self, job: Job) -> ReplicaStatus:
        """Of a job that AWS does not know: lost, unless another account was asked."""
        try:
            account = caller_account(self._clients, job.region)
        except DilocoError as error:
            return ReplicaStatus("unknown", message=error.message)
        if job.account and account != job.account:
            message = f"it is in account {job.account}, and the credentials here are of {account}"
            return ReplicaStatus("unknown", message=message)
        message = f"SageMaker knows no training job {job.name}"
        return ReplicaStatus("failed", reason="lost", message=message)

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """The last ``n_lines`` lines of stdout and stderr; "" where CloudWatch does not tell."""
        job = Job.of(handle)
        if job is None:
            return ""
        try:
            return logs.tail(self._clients.get("logs", job.region), job.name, n_lines)
        except Exception as error:  # best effort, whatever it is
            logger.warning("the log of replica %d cannot be read: %s", handle.rank, _line(error))
            return ""

    def follow_logs(
        self, handle: ReplicaHandle, *, since: float | None = None, interval: float = 2.0
    ) -> Iterator[str]:
        """Lines that the replica prints, as they come, until it has ended and all are told.

        Its state decides when that is, never the log. Goes on when AWS could not be reached.

        Args:
            handle: of the replica.
            since: seconds since the epoch; default: the beginning.
            interval: seconds between two looks.
        """
        job = Job.of(handle)
        if job is None:
            return
        follower = logs.LogFollower(self._clients.get("logs", job.region), job.name, since)
        last_word: float | None = None
        while True:
            if last_word is None and self.poll(handle).is_terminal:
                last_word = self._clock() + _LOG_DELAY_S
            over = last_word is not None and self._clock() >= last_word
            try:
                yield from follower.read_new()
            except Exception as error:  # it is tried again
                logger.warning("a log cannot be read: %s", _line(error))
                over = False
            if over:
                return
            self._sleep(interval)

    def usage(self, handle: ReplicaHandle) -> Usage | None:
        """What AWS bills a replica for, so far; None where it does not tell."""
        job = Job.of(handle)
        if job is None:
            return None
        try:
            return usage_of(self._board.describe(job))
        except Exception as error:  # best effort, whatever it is
            logger.warning("the bill of replica %d is unknown: %s", handle.rank, _line(error))
            return None

    def cancel(self, handle: ReplicaHandle) -> None:
        """Ask the replica to stop: SIGTERM, and 120 seconds to hand over its work.

        Raises:
            UsageError: these credentials do not allow it.
            LaunchError: AWS could not be told.
        """
        job = Job.of(handle)
        if job is None:
            return
        try:
            client = self._clients.get("sagemaker", job.region, patient=True)
            client.stop_training_job(TrainingJobName=job.name)
        except DilocoError:
            raise
        except Exception as error:  # botocore has no one base of its errors
            # Of a job that has ended or never was, the service says that the request is not valid.
            if not is_unknown_job(error) and code_of(error) != "ValidationException":
                raise translated(error, f"cancel replica {handle.rank}") from error

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None
    ) -> list[ReplicaResult]:
        """Wait for the replicas; see :meth:`ServerlessExecutor.collect`."""
        return collect_replicas(
            handles,
            one_by_one(self.poll),  # which asks for all jobs of a launch at once
            timeout=timeout,
            clock=self._clock,
            sleep=self._sleep,
        )

    # -- a launch ------------------------------------------------------------------------------

    def recover(self, name: str) -> list[ReplicaHandle]:
        """Handles of all replicas that were launched as ``options.name``, ended ones too.

        Raises:
            UsageError: these credentials do not allow it.
            LaunchError: AWS cannot be asked.
        """
        regions, surely = self._regions(name)
        handles: list[ReplicaHandle] = []
        for region in regions:
            try:
                arns = self._board.arns(name, region)
            except Exception as error:  # botocore has no one base of its errors
                raise translated(error, f"look for training jobs of {name}") from error
            handles += [Job(found, name, region).handle(arn=arn) for found, arn in arns.items()]
        if not handles and not surely:
            whose = account_text(self._clients, regions[0])
            logger.warning(NOTHING_THERE, name, ", ".join(regions), whose)
        return handles

    def _regions(self, name: str) -> tuple[list[str], bool]:
        """Where jobs of a launch may be; and whether that is more than this machine's setting."""
        if self._settings.region is not None:
            return [self._settings.region], True
        if seen := self._board.regions(name):  # by the handles of others of its replicas
            return seen, True
        return [self._clients.region()], False

    def release(self, name: str) -> None:
        """Delete the secrets of a run that has ended; see :class:`ReleasesRun`.

        They stay while a job of the run goes on, and while a launch of a moment ago may need them.
        """
        try:
            for region in self._regions(name)[0]:
                manager = self._clients.get("secretsmanager", region)
                age_s = secrets.age_s(manager, name)
                if age_s is None or age_s < _MARGIN_S or self._board.is_going(name, region):
                    continue
                secrets.forget(manager, name)
        except Exception as error:  # botocore has no one base of its errors
            from botocore.exceptions import NoCredentialsError

            # Whoever only looks at a run need not be allowed, or able, to see its secrets.
            unable = is_denied(error) or isinstance(error, (ConfigError, NoCredentialsError))
            level = logging.DEBUG if unable else logging.WARNING
            logger.log(level, "secrets of %s may be left: %s", name, _line(error))

    def forget(self, handle: ReplicaHandle) -> None:
        """Delete the secrets of the replica's launch, and let its warm instance go.

        The training job itself stays in AWS's records, and so does its log.
        """
        job = Job.of(handle)
        if job is None:
            return
        if handle.metadata.get("has_secrets"):
            secrets.forget(self._clients.get("secretsmanager", job.region), job.launch)
        client = self._clients.get("sagemaker", job.region)
        with contextlib.suppress(client.exceptions.ClientError):  # it went meanwhile, or never was
            pool = self._board.describe(job).get("WarmPoolStatus", {})
            if pool.get("Status") == "Available":
                client.update_training_job(
                    TrainingJobName=job.name, ResourceConfig={"KeepAlivePeriodInSeconds": 0}
                )


def _line(error: Exception) -> str:
    return error.message if isinstance(error, DilocoError) else message_of(error)
