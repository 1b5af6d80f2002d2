"""The execution role, looked at before anything is launched."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, Final

from diloco_cloud.errors import ConfigError, DilocoError
from diloco_cloud.executors.sagemaker.clients import Clients
from diloco_cloud.executors.sagemaker.faults import code_of, message_of, translated
from diloco_cloud.executors.sagemaker.jobs import account_of

logger = logging.getLogger(__name__)

_SERVICE: Final = "sagemaker.amazonaws.com"


def caller_account(clients: Clients, region: str) -> str:
    """The account that the credentials here belong to. Everybody may ask.

    Raises:
        UsageError: the credentials are not valid.
        LaunchError: they have expired, or AWS cannot be asked.
    """
    try:
        return str(clients.get("sts", region).get_caller_identity()["Account"])
    except Exception as error:  # botocore has no one base of its errors
        raise translated(error, "use the AWS credentials") from error


def account_text(clients: Clients, region: str) -> str:
    """The same for people, who are told so where AWS does not say."""
    try:
        return f"account {caller_account(clients, region)}"
    except DilocoError as error:
        return f"an account that is not known ({error.message})"


def check_role(clients: Clients, region: str, role: str) -> None:
    """Check that SageMaker will be able to take on a role.

    Whoever may not look at roles is believed: creating a job is then refused where it is wrong.

    Args:
        clients: of AWS.
        region: where jobs are to run.
        role: its ARN.

    Raises:
        ConfigError: it is in another account, it does not exist, or it does not trust SageMaker.
    """
    account, own = account_of(role), caller_account(clients, region)
    if account != own:
        raise ConfigError(
            f"the role is in account {account}, and the credentials here are of {own}",
            fix="Name a role of the same account, or set AWS_PROFILE.",
        )
    name = role.rpartition("/")[2]
    try:
        found = clients.get("iam", region).get_role(RoleName=name)["Role"]
    except Exception as error:  # botocore has no one base of its errors
        if code_of(error) == "NoSuchEntity":
            raise ConfigError(
                f"there is no role {name} in account {account}",
                fix="`aws iam list-roles --query Roles[].Arn` tells which there are.",
            ) from None
        logger.debug("the role %s cannot be looked at: %s", name, message_of(error))
        return
    if not _trusts_sagemaker(found.get("AssumeRolePolicyDocument")):
        raise ConfigError(
            f"the role {name} does not let {_SERVICE} assume it",
            fix=f"Add {_SERVICE} to the principals of its trust policy.",
        )


def _trusts_sagemaker(policy: object) -> bool:
    document: Any = json.loads(policy) if isinstance(policy, str) else policy
    if not isinstance(document, Mapping):
        return True  # nothing that could be judged
    statements = document.get("Statement", [])
    for statement in [statements] if isinstance(statements, Mapping) else statements:
        principal = statement.get("Principal", {})
        services = principal.get("Service", []) if isinstance(principal, Mapping) else principal
        named = [services] if isinstance(services, str) else list(services)
        if statement.get("Effect") == "Allow" and (_SERVICE in named or "*" in named):
            return True
    return False
