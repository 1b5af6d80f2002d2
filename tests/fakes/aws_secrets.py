"""Secrets Manager: values by name."""

from __future__ import annotations

import threading
import time
import uuid
from typing import Any

from fakes.aws_errors import AwsError


class SecretsManager:
    """All secrets of one account and region.

    Attributes:
        values: by name.
        changed_at: seconds since the epoch, by name.
        deleting: how many more requests to create one will find its namesake not gone yet.
    """

    def __init__(self, region: str, account: str) -> None:
        self._arn = f"arn:aws:secretsmanager:{region}:{account}:secret:"
        self._lock = threading.Lock()
        self.values: dict[str, str] = {}
        self.changed_at: dict[str, float] = {}
        self.deleting = 0

    def CreateSecret(self, params: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            name = params["Name"]
            if name in self.values:
                message = f"The operation failed because the secret {name} already exists."
                raise AwsError("ResourceExistsException", message)
            if self.deleting > 0:
                self.deleting -= 1
                message = "You can't create this secret because a secret with this name is already "
                raise AwsError("InvalidRequestException", f"{message}scheduled for deletion.")
            self.values[name], self.changed_at[name] = params["SecretString"], time.time()
            return self._answer(name)

    def DescribeSecret(self, params: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            name = self._known(params)
            return {**self._answer(name), "LastChangedDate": self.changed_at[name]}

    def PutSecretValue(self, params: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            name = self._known(params)
            self.values[name], self.changed_at[name] = params["SecretString"], time.time()
            return self._answer(name)

    def GetSecretValue(self, params: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            name = self._known(params)
            return {**self._answer(name), "SecretString": self.values[name]}

    def DeleteSecret(self, params: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            name = self._known(params)
            if not params.get("ForceDeleteWithoutRecovery"):
                raise AwsError("InvalidRequestException", "the fake deletes for good only")
            del self.values[name]
            return {"Name": name, "ARN": self._arn + name}

    def _known(self, params: dict[str, Any]) -> str:
        name = str(params["SecretId"]).removeprefix(self._arn)
        if name not in self.values:
            message = "Secrets Manager can't find the specified secret."
            raise AwsError("ResourceNotFoundException", message)
        return name

    def _answer(self, name: str) -> dict[str, Any]:
        return {"Name": name, "ARN": self._arn + name, "VersionId": str(uuid.uuid4())}
