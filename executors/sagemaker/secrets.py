"""Secrets of a run, kept in AWS Secrets Manager: training jobs have no secret channel."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from diloco_cloud.executors.sagemaker.faults import code_of
from diloco_cloud.secrets import Secret, revealed, unlogged

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


def keep(client: Any, name: str, secrets: Mapping[str, Secret]) -> bool:
    """Keep a launch's secrets; whether they are the first of this name.

    What this raises holds their values: its request is in it.

    Args:
        client: of Secrets Manager.
        name: of the launch.
        secrets: by variable.
    """
    with unlogged("botocore"):  # which logs whole requests
        try:
            client.create_secret(**creation(name, list(secrets)), SecretString=_text(secrets))
        except client.exceptions.ResourceExistsException:  # an earlier attempt's, maybe outdated
            client.put_secret_value(SecretId=secret_name(name), SecretString=_text(secrets))
            return False
    return True


def _text(secrets: Mapping[str, Secret]) -> str:
    return json.dumps(revealed(secrets))


def forget(client: Any, name: str) -> None:
    """Delete a launch's secrets for good, if there are any."""
    try:
        client.delete_secret(SecretId=secret_name(name), ForceDeleteWithoutRecovery=True)
    except client.exceptions.ClientError as error:
        if code_of(error) != "ResourceNotFoundException":
            raise
