"""Clients of AWS, made when they are first needed."""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
from typing import Any, Final

from diloco_cloud.errors import ConfigError, MissingDependencyError
from diloco_cloud.executors.sagemaker.faults import translated

_CONNECT_S: Final = 5
#: Tries, and seconds of silence in each: of a question that can be asked again later, and of a
#: request that a launch hangs on.
_TRIES, _READ_S = 2, 10
_PATIENT_TRIES, _PATIENT_READ_S = 8, 60


def require_sdk() -> None:
    """Raise ``MissingDependencyError`` where boto3 is not installed; imports nothing."""
    if importlib.util.find_spec("boto3") is None:
        raise MissingDependencyError(
            "the backend 'sagemaker' needs boto3, which is not installed",
            fix="pip install 'diloco-cloud[sagemaker]'",
        )


class Clients:
    """Clients by service and region; may be used from several threads.

    Args:
        profile: of ``~/.aws``; default: boto3's own rules.
    """

    def __init__(self, profile: str | None = None) -> None:
        self._profile = profile
        self._lock = threading.Lock()
        self._session: Any = None
        self._made: dict[tuple[str, str, bool], Any] = {}

    def region(self) -> str:
        """The region that the environment or the profile names.

        Raises:
            ConfigError: none does, or there is no such profile.
        """
        # Most of AWS's SDKs know the first name; boto3 knows the second.
        region = os.environ.get("AWS_REGION") or self.session().region_name
        if not region:
            raise ConfigError(
                "no AWS region is set", fix="Set AWS_REGION, or add --backend-arg region=us-east-1."
            )
        return str(region)

    def session(self) -> Any:
        """The boto3 session, which is not to be used from several threads.

        Raises:
            ConfigError: there is no such profile.
        """
        import boto3
        from botocore.exceptions import BotoCoreError

        with self._lock:
            if self._session is None:
                try:
                    self._session = boto3.Session(profile_name=self._profile)
                except BotoCoreError as error:
                    raise translated(error, "use the AWS profile") from error
            return self._session

    def get(self, service: str, region: str, *, patient: bool = False) -> Any:
        """A client.

        Args:
            service: in boto3's words.
            region: of AWS.
            patient: whether to try for long and to slow down when told to.
        """
        from botocore.config import Config

        session = self.session()
        with self._lock:
            key = (service, region, patient)
            if key not in self._made:
                retries = {
                    "mode": "adaptive" if patient else "standard",
                    "total_max_attempts": _PATIENT_TRIES if patient else _TRIES,
                }
                config = Config(
                    connect_timeout=_CONNECT_S,
                    read_timeout=_PATIENT_READ_S if patient else _READ_S,
                    retries=retries,
                    user_agent_extra="diloco-cloud",
                    max_pool_connections=16,
                )
                options: dict[str, Any] = {}
                if service == "s3":  # SageMaker reads Amazon's, wherever the run's store is
                    options["endpoint_url"] = os.environ.get("AWS_ENDPOINT_URL") or None
                    config = config.merge(Config(ignore_configured_endpoint_urls=True))
                self._made[key] = session.client(
                    service, region_name=region, config=config, **options
                )
            return self._made[key]

    def require_credentials(self) -> None:
        """Find out whether there are any; they may still be refused.

        Raises:
            ConfigError: there are none.
        """
        from botocore.exceptions import BotoCoreError

        try:
            found = self.session().get_credentials()
        except BotoCoreError as error:
            raise translated(error, "get AWS credentials") from error
        if found is None:
            raise ConfigError(
                "there are no AWS credentials here",
                fix="`aws configure`, `aws sso login`, or AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY.",
            )


@functools.cache
def training_instances() -> frozenset[str]:
    """Every instance type that training jobs may run on, as boto3's copy of the API has it."""
    import botocore.session

    model = botocore.session.get_session().get_service_model("sagemaker")
    return frozenset(model.shape_for("TrainingInstanceType").enum)
