"""The S3 policy of docs/stores.md is enough for a run, and nothing in it can be left out."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from diloco_cloud.errors import DeniedError
from diloco_cloud.store import open_store
from diloco_cloud.store.probe import probe_store

BUCKET = "my-bucket"
PAGE = Path(__file__).parents[2] / "docs" / "stores.md"
POLICY: dict[str, Any] = json.loads(
    next(iter(re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.S)))
)
#: moto looks up the right to a bulk delete with the bucket as the resource; S3, with each object.
MOTO_BULK_DELETE = {
    "Effect": "Allow",
    "Action": "s3:DeleteObject",
    "Resource": f"arn:aws:s3:::{BUCKET}",
}


def _wait_until_up(server: subprocess.Popen[bytes], endpoint: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server has ended"
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{endpoint}/moto-api/", timeout=5).close()
            return
        time.sleep(0.05)
    raise TimeoutError(endpoint)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_until_up(server, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=10)


@pytest.fixture
def grant(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    """Makes a user who has one policy, and puts its keys into the environment."""

    def unchecked(requests: float) -> None:
        """Let so many requests through without a look at permissions."""
        request = urllib.request.Request(
            f"{endpoint}/moto-api/reset-auth",
            data=str(requests).encode(),
            headers={"Content-Type": "text/plain"},
            method="POST",
        )
        urllib.request.urlopen(request, timeout=10).close()

    def make(policy: dict[str, Any]) -> None:
        unchecked(float("inf"))
        urllib.request.urlopen(
            urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST"), timeout=10
        ).close()
        root = boto3.session.Session("root", "root", region_name="us-east-1")
        root.client("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)
        iam = root.client("iam", endpoint_url=endpoint)
        iam.create_user(UserName="replica")
        iam.put_user_policy(UserName="replica", PolicyName="run", PolicyDocument=json.dumps(policy))
        key = iam.create_access_key(UserName="replica")["AccessKey"]
        unchecked(0)
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])

    return make


def _with_bulk_delete(policy: dict[str, Any]) -> dict[str, Any]:
    return {**policy, "Statement": [*policy["Statement"], MOTO_BULK_DELETE]}


def _without(action: str) -> dict[str, Any]:
    policy = copy.deepcopy(POLICY)
    for statement in policy["Statement"]:
        actions = statement["Action"]
        listed = [actions] if isinstance(actions, str) else actions
        statement["Action"] = [a for a in listed if a != action] or ["s3:GetBucketTagging"]
    return policy if action == "s3:DeleteObject" else _with_bulk_delete(policy)


def test_policy_of_the_page_is_enough(grant: Callable[[dict[str, Any]], None]) -> None:
    grant(_with_bulk_delete(POLICY))
    probe_store(open_store(f"s3://{BUCKET}/runs"))


def test_policy_of_the_page_ends_at_its_prefix(grant: Callable[[dict[str, Any]], None]) -> None:
    grant(_with_bulk_delete(POLICY))
    elsewhere = open_store(f"s3://{BUCKET}/elsewhere")
    with pytest.raises(DeniedError):
        elsewhere.put("object", b"")
    with pytest.raises(DeniedError):
        elsewhere.get("object")


@pytest.mark.parametrize(
    "action", ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:ListBucket"]
)
def test_policy_of_the_page_has_nothing_to_spare(
    grant: Callable[[dict[str, Any]], None], action: str
) -> None:
    grant(_without(action))
    with pytest.raises(DeniedError):
        probe_store(open_store(f"s3://{BUCKET}/runs"))
