"""The probe refuses what cannot carry a run, and says why."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from helpers_http import proxy
from servers import S3Server, free_ports

from diloco_cloud.errors import (
    DeniedError,
    NotFoundError,
    UnreachableError,
    UnsupportedStoreError,
)
from diloco_cloud.store import RetryPolicy, open_store, probe_store
from diloco_cloud.store.filesystem import FilesystemStore
from diloco_cloud.store.metered import MeteredStore

ONCE = RetryPolicy(attempts=1)


def test_probe_refuses_a_server_that_ignores_conditions(
    s3_env: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy(s3_env.endpoint) as between:
        between.ignores_conditions = True
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.endpoint)
        store = open_store(f"s3://{s3_env.bucket}/{uuid.uuid4().hex}")
        with pytest.raises(UnsupportedStoreError, match="ignores If-None-Match") as caught:
            probe_store(store)
        assert caught.value.fix is not None
        assert store.list() == []


def test_probe_names_a_missing_bucket(s3_env: S3Server) -> None:
    with pytest.raises(NotFoundError, match="no-such-bucket") as caught:
        probe_store(open_store("s3://no-such-bucket/x"))
    assert "Create the bucket" in (caught.value.fix or "")


def test_probe_names_a_store_it_may_not_write(
    s3_env: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(DeniedError, match="cannot create an object in s3://") as caught:
        probe_store(open_store(f"s3://{s3_env.bucket}/x"))
    assert caught.value.fix is not None


def test_probe_of_a_server_that_is_not_there(
    s3_env: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_ports(1)[0]}")
    with pytest.raises(UnreachableError, match="connection refused"):
        probe_store(open_store(f"s3://{s3_env.bucket}/x", retry=ONCE))


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_probe_refuses_filesystems_that_look_before_they_write(
    tmp_path: Path, protocol: str
) -> None:
    from fsspec import filesystem

    store = FilesystemStore(filesystem(protocol, skip_instance_cache=True), str(tmp_path / "s"))
    with pytest.raises(UnsupportedStoreError, match="exactly once"):
        probe_store(store)


def test_probe_costs_few_requests() -> None:
    store = MeteredStore(open_store(f"memory://{uuid.uuid4().hex}"))
    probe_store(store)
    assert store.usage.requests.total() <= 10
    assert store.usage.requests["create"] == 2
