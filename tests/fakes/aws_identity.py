"""STS and IAM, as far as a launcher asks them; both answer in XML."""

from __future__ import annotations

import json
from urllib.parse import quote

from fakes.aws_errors import AwsError

#: A role's trust policy, for the service that may take it on.
TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": "sagemaker.amazonaws.com"},
            "Action": "sts:AssumeRole",
        }
    ],
}


class Identity:
    """Accounts by access key, and roles by name.

    Attributes:
        accounts: by access key.
        roles: trust policies by name of the role, all in the first account.
        may_read_roles: whether callers are allowed iam:GetRole.
    """

    def __init__(self, accounts: dict[str, str]) -> None:
        self.accounts = accounts
        self.roles = {"replica": TRUST}
        self.may_read_roles = True

    def arn(self, role: str = "replica") -> str:
        """A role of the first account."""
        return f"arn:aws:iam::{next(iter(self.accounts.values()))}:role/{role}"

    def can_assume(self, arn: str) -> bool:
        """Whether SageMaker can take on a role."""
        return arn in {self.arn(role) for role, policy in self.roles.items() if policy is TRUST}

    def call(self, action: str, params: dict[str, str], account: str) -> str:
        """The answer to a request of the query protocol."""
        if action == "GetCallerIdentity":
            inner = (
                f"<Arn>arn:aws:iam::{account}:user/tester</Arn>"
                f"<UserId>AIDA</UserId><Account>{account}</Account>"
            )
            return _xml(action, inner, "https://sts.amazonaws.com/doc/2011-06-15/")
        if action == "GetRole":
            return _xml(
                action, self._role(params["RoleName"]), "https://iam.amazonaws.com/doc/2010-05-08/"
            )
        raise AwsError("InvalidAction", f"the fake has no {action}")

    def _role(self, name: str) -> str:
        if not self.may_read_roles:
            message = "User is not authorized to perform: iam:GetRole"
            raise AwsError("AccessDenied", message, 403)
        if name not in self.roles:
            message = f"The role with name {name} cannot be found."
            raise AwsError("NoSuchEntity", message, 404)
        policy = quote(json.dumps(self.roles[name]))
        return (
            f"<Role><Path>/</Path><RoleName>{name}</RoleName><RoleId>AROA</RoleId>"
            f"<Arn>{self.arn(name)}</Arn><CreateDate>2026-01-01T00:00:00Z</CreateDate>"
            f"<AssumeRolePolicyDocument>{policy}</AssumeRolePolicyDocument></Role>"
        )


def error_xml(error: AwsError) -> str:
    """An error of the query protocol."""
    return (
        f"<ErrorResponse><Error><Type>Sender</Type><Code>{error.code}</Code>"
        f"<Message>{error.message}</Message></Error><RequestId>0</RequestId></ErrorResponse>"
    )


def _xml(action: str, inner: str, namespace: str) -> str:
    return (
        f'<{action}Response xmlns="{namespace}"><{action}Result>{inner}</{action}Result>'
        f"<ResponseMetadata><RequestId>0</RequestId></ResponseMetadata></{action}Response>"
    )
