"""Fixtures that every room's tests may use."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from servers import S3Server, seaweedfs

#: How long an example takes says more about the machine's other work than about the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def local_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what local replicas leave behind out of the home directory."""
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server with authentication, one per test process."""
    with seaweedfs() as server:
        yield server


@pytest.fixture
def s3_env(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, with its address and credentials in the environment; children inherit them."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def s3_uri(s3_env: S3Server) -> str:
    """An empty prefix on the S3 server, with the environment set for it."""
    return f"s3://{s3_env.bucket}/{uuid.uuid4().hex}"


@pytest.fixture(params=["directory", "s3"])
def store_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store, on disk and on S3 in turn.

    Choose the kinds with ``@pytest.mark.parametrize("store_uri", ["directory"], indirect=True)``;
    "memory" is one too, for tests within one process.
    """
    if request.param == "directory":
        return str(tmp_path / "store")
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    if request.param == "s3":
        uri: str = request.getfixturevalue("s3_uri")
        return uri
    raise ValueError(f"no store of kind {request.param!r}")
