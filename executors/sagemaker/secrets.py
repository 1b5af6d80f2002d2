"""Secrets of a run, kept in AWS Secrets Manager: training jobs have no secret channel."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from diloco_cloud.executors.sagemaker.faults import code_of

#: Tells a replica where its secrets are: "region:name".
SECRETS_ENV: Final = "DILOCO_SECRETS_AT"
#: A policy can be written for all secrets that begin with it.
_PREFIX: Final = "diloco-cloud/"


def secret_name(name: str) -> str:
    """The secret of a launch of this name."""
    return f"{_PREFIX}{name}"


def creation(name: str, names: Sequence[str]) -> dict[str, Any]:
    """The request that keeps a launch's secrets, without their values."""
    return {
        "Name": secret_name(name),
        "Description": f"{', '.join(names)} for replicas of {name}",
        "Tags": [{"Key": "diloco-run", "Value": name}],
    }


def keep(client: Any, name: str, values: Mapping[str, str]) -> bool:
    """Keep a launch's secrets; whether they are the first of this name.

    Args:
        client: of Secrets Manager.
        name: of the launch.
        values: by variable.
    """
    text = json.dumps(dict(values))
    with _unlogged():
        try:
            client.create_secret(**creation(name, list(values)), SecretString=text)
        except client.exceptions.ResourceExistsException:  # an earlier attempt's, maybe outdated
            client.put_secret_value(SecretId=secret_name(name), SecretString=text)
            return False
    return True


def forget(client: Any, name: str) -> None:
    """Delete a launch's secrets for good, if there are any."""
    try:
        client.delete_secret(SecretId=secret_name(name), ForceDeleteWithoutRecovery=True)
    except client.exceptions.ClientError as error:
        if code_of(error) != "ResourceNotFoundException":
            raise


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Keep botocore, which logs whole requests at level DEBUG, from doing so."""
    logger = logging.getLogger("botocore")
    level = logger.level
    if logger.isEnabledFor(logging.DEBUG):
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
