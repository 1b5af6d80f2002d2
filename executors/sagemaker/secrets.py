"""Secrets of a run, kept in AWS Secrets Manager: training jobs have no secret channel."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from diloco_cloud.executors.sagemaker.faults import code_of
from diloco_cloud.secrets import Secret, revealed, unlogged

#: Tells a replica where its secrets are: "region:name".
SECRETS_ENV: Final = "DILOCO_SECRETS_AT"
#: A policy can be written for all secrets that begin with it.
_PREFIX: Final = "diloco-cloud/"
#: What AWS says of a name whose secret was released a moment ago.
_DELETING: Final = "scheduled for deletion"
#: Seconds before each further try to keep a secret whose namesake AWS is still deleting.
_PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0)


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


def keep(
    client: Any,
    name: str,
    secrets: Mapping[str, Secret],
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Keep a launch's secrets; whether they are the first of this name.

    What this raises holds their values: its request is in it.

    Args:
        client: of Secrets Manager.
        name: of the launch.
        secrets: by variable.
        sleep: waits that many seconds.
    """
    with unlogged("botocore"):  # which logs whole requests
        for pause in (*_PAUSES_S, None):
            try:
                client.create_secret(**creation(name, list(secrets)), SecretString=_text(secrets))
                return True
            except client.exceptions.ResourceExistsException:  # an earlier attempt's
                client.put_secret_value(SecretId=secret_name(name), SecretString=_text(secrets))
                return False
            except client.exceptions.InvalidRequestException as error:
                if pause is None or _DELETING not in str(error):
                    raise
            sleep(pause)
    raise AssertionError("the last try returns or raises")


def _text(secrets: Mapping[str, Secret]) -> str:
    return json.dumps(revealed(secrets))


def forget(client: Any, name: str) -> None:
    """Delete a launch's secrets for good, if there are any."""
    try:
        client.delete_secret(SecretId=secret_name(name), ForceDeleteWithoutRecovery=True)
    except client.exceptions.ClientError as error:
        if code_of(error) != "ResourceNotFoundException":
            raise


def age_s(client: Any, name: str) -> float | None:
    """Seconds since a launch's secrets were kept, the last time; None where there are none."""
    try:
        found = client.describe_secret(SecretId=secret_name(name))
    except client.exceptions.ResourceNotFoundException:
        return None
    if "DeletedDate" in found:
        return None
    return time.time() - float(found["LastChangedDate"].timestamp())
