"""AWS over a socket: enough of it for a launcher of training jobs, and for what they run.

It speaks JSON 1.1 (SageMaker, CloudWatch Logs, Secrets Manager), the query protocol (STS, IAM) and
the containers' credentials endpoint to the real boto3, judges requests by the services' own models,
and keeps every request. Signatures are not verified; access keys are.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl

from fakes.aws_errors import AwsError
from fakes.aws_identity import Identity, error_xml
from fakes.aws_logs import Logs
from fakes.aws_secrets import SecretsManager
from fakes.aws_training import Training
from fakes.aws_validation import validate

REGION, ACCOUNT, STRANGERS_ACCOUNT = "us-east-1", "123456789012", "999999999999"
#: Access keys of the account that the jobs are in, and of another one.
KEY, STRANGERS_KEY = "test-key", "strangers-key"
#: What happens to a request: it is not heard; it is heard, and the answer is lost, or does not come
#: until the server is told; it is refused; or it is answered by an error of AWS's.
Fault = (
    Literal["lose_request", "lose_reply", "hang", "throttle", "unavailable", "expired"] | AwsError
)
_TARGETS = {"SageMaker": "sagemaker", "Logs_20140328": "logs", "secretsmanager": "secretsmanager"}
_SERVICES = ("SAGEMAKER", "CLOUDWATCH_LOGS", "SECRETS_MANAGER", "STS", "IAM")
_ERRORS = {
    "throttle": AwsError("ThrottlingException", "Rate exceeded"),
    "unavailable": AwsError("ServiceUnavailable", "the service is unavailable", 503),
    "expired": AwsError(
        "ExpiredTokenException", "The security token included in the request is expired"
    ),
}


@dataclass
class Recorded:
    """A request.

    Attributes:
        operation: "CreateTrainingJob".
        body: as it came.
    """

    operation: str
    body: str
    params: dict[str, Any] = field(default_factory=dict)


class FakeAws(ThreadingHTTPServer):
    """The server.

    Attributes:
        endpoint: "http://127.0.0.1:port".
        requests: all that came, in order.
        faults: for the next requests of an operation: ("CreateTrainingJob", "lose_reply").
        hanging: set while a request hangs.
        role_credentials: what replicas get from their execution role.
    """

    daemon_threads = True

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.directory = directory
        self.requests: list[Recorded] = []
        self.faults: list[tuple[str, Fault]] = []
        self.role_credentials: dict[str, str] = {}
        self._lock = threading.Lock()
        self._out = threading.Event()
        self.hanging, self._closing = threading.Event(), threading.Event()
        self.identity = Identity({KEY: ACCOUNT, STRANGERS_KEY: STRANGERS_ACCOUNT})
        self.logs = Logs()
        self.secrets = SecretsManager(REGION, ACCOUNT)
        self.training = Training(
            directory,
            self.logs,
            self.identity,
            region=REGION,
            account=ACCOUNT,
            container_environment=self._container_environment,
            download=self._download,
        )
        self._strangers = Training(
            directory,
            self.logs,
            self.identity,
            region=REGION,
            account=STRANGERS_ACCOUNT,
            container_environment=dict,
            download=lambda *_: None,
        )
        (directory / "token").write_text("of the container")

    @property
    def env(self) -> dict[str, str]:
        """What a launcher needs in its environment."""
        return {
            **{f"AWS_ENDPOINT_URL_{name}": self.endpoint for name in _SERVICES},
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": "test-secret",
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def role(self) -> str:
        """ARN of a role that SageMaker can take on."""
        return self.identity.arn()

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Hang up on everybody until the block ends."""
        self._out.set()
        try:
            yield
        finally:
            self._out.clear()

    @property
    def is_out(self) -> bool:
        return self._out.is_set()

    def operations(self) -> list[str]:
        """Names of all operations that were asked for, in order."""
        return [request.operation for request in self.requests]

    def fault(self, operation: str) -> Fault | None:
        """The fault that is due for a request, once."""
        with self._lock:
            for i, (wanted, fault) in enumerate(self.faults):
                if wanted == operation:
                    del self.faults[i]
                    return fault
        return None

    def call(self, target: str, params: dict[str, Any], account: str) -> dict[str, Any]:
        """The answer to a request of the JSON protocol."""
        prefix, _, operation = target.partition(".")
        service = _TARGETS[prefix]
        validate(service, operation, params)
        home = account == ACCOUNT
        training = self.training if home else self._strangers
        place: Any = {"sagemaker": training, "logs": self.logs, "secretsmanager": self.secrets}
        answer: dict[str, Any] = getattr(place[service], operation)(params)
        return answer

    def hang(self) -> None:
        """Keep a caller waiting until the server is closed."""
        self.hanging.set()
        self._closing.wait(60)

    def close(self) -> None:
        self._closing.set()
        self.training.close()
        self.shutdown()
        self.server_close()

    def _container_environment(self) -> dict[str, str]:
        return {
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{self.endpoint}/role-credentials",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(self.directory / "token"),
            "AWS_ENDPOINT_URL_SECRETS_MANAGER": self.endpoint,
        }

    def _download(self, creation: dict[str, Any], directory: Path) -> None:
        """Bring the files of a job's channels, as the launcher could read them."""
        import boto3

        for channel in creation.get("InputDataConfig", ()):
            place = directory / "opt/ml/input/data" / channel["ChannelName"]
            uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
            bucket, _, prefix = uri.removeprefix("s3://").partition("/")
            client = boto3.client("s3", region_name=REGION)
            found = client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", ())
            for item in found:
                path = place / item["Key"].removeprefix(prefix)
                path.parent.mkdir(parents=True, exist_ok=True)
                client.download_file(bucket, item["Key"], str(path))
            client.close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeAws
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path != "/role-credentials" or not self.server.role_credentials:
            return self._answer(404, b"{}")
        credentials = {"Token": "", "Expiration": "2099-01-01T00:00:00Z"}
        self._answer(200, json.dumps({**credentials, **self.server.role_credentials}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        target = self.headers.get("X-Amz-Target")
        params = json.loads(body) if target else dict(parse_qsl(body))
        operation = target.partition(".")[2] if target else params.get("Action", "?")
        self.server.requests.append(Recorded(operation, body, params))
        fault = self.server.fault(operation)
        if self.server.is_out or fault == "lose_request":
            return self._hang_up()
        try:
            account = self._account()
            if isinstance(fault, AwsError):
                raise fault
            if fault in _ERRORS:
                raise _ERRORS[fault]
            if target:
                answer = json.dumps(self.server.call(target, params, account)).encode()
            else:
                answer = self.server.identity.call(operation, params, account).encode()
        except AwsError as error:
            told = {"__type": error.code, "message": error.message}
            text = json.dumps(told) if target else error_xml(error)
            return self._answer(error.status, text.encode())
        if fault == "hang":
            self.server.hang()
        if fault in ("lose_reply", "hang"):
            return self._hang_up()
        self._answer(200, answer)

    def _account(self) -> str:
        found = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization") or "")
        accounts: Mapping[str, str] = self.server.identity.accounts
        if found is None:
            raise AwsError("MissingAuthenticationToken", "there is no signature", 403)
        if found[1] not in accounts:
            message = "The security token included in the request is invalid."
            raise AwsError("UnrecognizedClientException", message)
        return accounts[found[1]]

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response_only(status)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the tests' output clean."""


@contextlib.contextmanager
def fake_aws() -> Iterator[FakeAws]:
    """Run a server until the block ends; it ends all jobs, too."""
    directory = Path(tempfile.mkdtemp(prefix="aws-"))
    server = FakeAws(directory)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()
        shutil.rmtree(directory, ignore_errors=True)


def clean_aws_environment() -> list[str]:
    """Variables of this process that would lead boto3 elsewhere."""
    return [name for name in os.environ if name.startswith("AWS_")]
