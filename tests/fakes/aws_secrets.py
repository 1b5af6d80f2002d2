"""Secrets Manager: values by name."""

from __future__ import annotations

import threading
import uuid
from typing import Any

from fakes.aws_errors import AwsError


class SecretsManager:
    """All secrets of one account and region.

    Attributes:
        values: by name.
    """

    def __init__(self, region: str, account: str) -> None:
        self._arn = f"arn:aws:secretsmanager:{region}:{account}:secret:"
        self._lock = threading.Lock()
        self.values: dict[str, str] = {}

    def CreateSecret(self, params: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            name = params["Name"]
            if name in self.values:
                message = f"The operation failed because the secret {name} already exists."
                raise AwsError("ResourceExistsException", message)
            self.values[name] = params["SecretString"]
            return self._answer(name)

    def PutSecretValue(self, params: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            name = self._known(params)
            self.values[name] = params["SecretString"]
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
