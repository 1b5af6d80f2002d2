"""Every driver, each on something real."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.hf_gateway import Gateway, fake_gateway
from servers import S3Server

from diloco_cloud.store import ObjectStore, RetryPolicy, open_store
from diloco_cloud.store.filesystem import FilesystemStore

DRIVERS = ("directory", "memory", "s3", "s3fs", "hf", "faults")
#: Everything that retries must hide, each for one request in five.
FAULTS = "&".join(
    f"{kind}=0.2" for kind in ("throttled", "timeout", "lost_reply", "duplicate", "torn", "expired")
)
#: Enough attempts for a third of them to succeed, and no waiting.
PATIENT = RetryPolicy(attempts=100, base_s=0.0)


@pytest.fixture(scope="session")
def s3fs_filesystem(s3_server: S3Server) -> Any:
    """fsspec's own S3 client, which takes a second to make."""
    from s3fs import S3FileSystem

    return S3FileSystem(
        key=s3_server.access_key,
        secret=s3_server.secret_key,
        client_kwargs={"endpoint_url": s3_server.endpoint, "region_name": "us-east-1"},
        skip_instance_cache=True,
    )


@pytest.fixture(scope="session")
def hf_gateway() -> Iterator[Gateway]:
    with fake_gateway() as gateway:
        yield gateway


@pytest.fixture
def hf_env(hf_gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> Gateway:
    """The hub's S3 gateway, with its address and credentials in the environment."""
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    for name, value in hf_gateway.env.items():
        monkeypatch.setenv(name, value)
    return hf_gateway


@pytest.fixture(params=DRIVERS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty store of each kind."""
    if request.param == "directory":
        return open_store(tmp_path / "store")
    if request.param == "memory":
        return open_store(f"memory://{uuid.uuid4().hex}")
    if request.param == "faults":
        uri = f"faults+memory://{uuid.uuid4().hex}?seed=1&clock_skew_s=5&{FAULTS}"
        return open_store(uri, retry=PATIENT)
    if request.param == "hf":
        gateway: Gateway = request.getfixturevalue("hf_env")
        return open_store(gateway.uri(uuid.uuid4().hex))
    server: S3Server = request.getfixturevalue("s3_env")
    if request.param == "s3fs":
        fs = request.getfixturevalue("s3fs_filesystem")
        return FilesystemStore(fs, f"{server.bucket}/{uuid.uuid4().hex}")
    return open_store(f"s3://{server.bucket}/{uuid.uuid4().hex}")
