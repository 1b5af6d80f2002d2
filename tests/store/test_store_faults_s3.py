"""Faults over a real S3 server; and real answers about expired credentials."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_time import FakeTime
from helpers_http import Proxy, proxy
from servers import S3Server

from diloco_cloud.errors import AlreadyExistsError, DeniedError, ExpiredCredentialsError
from diloco_cloud.store import ObjectStore, RetryingStore, open_driver, open_store
from diloco_cloud.store.faults import FaultyStore


@pytest.fixture
def unruly(s3_env: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the S3 server, to which the environment now points."""
    with proxy(s3_env.endpoint) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.endpoint)
        yield between


@pytest.fixture
def fake_time() -> FakeTime:
    return FakeTime()


def test_s3_with_faults_is_what_it_was_without(s3_uri: str, fake_time: FakeTime) -> None:
    faulty = open_driver(
        f"faults+{s3_uri}?seed=5&throttled=0.1&timeout=0.1&lost_reply=0.1&duplicate=0.2&torn=0.1"
        "&expired=0.1&clock_skew_s=9"
    )
    assert isinstance(faulty, FaultyStore)
    store = RetryingStore(faulty, fake_time.policy(attempts=30))
    for i in range(30):
        store.create(f"r/{i:02d}", [b"header", bytes([i]) * 1000])
        with pytest.raises(AlreadyExistsError):
            store.create(f"r/{i:02d}", b"another's")
        store.put("alive", f"{i}".encode())
        assert store.get("alive") == f"{i}".encode()
    assert [info.key for info in store.list("r/")] == [f"r/{i:02d}" for i in range(30)]
    store.delete_many([f"r/{i:02d}" for i in range(10)])
    plain = open_store(s3_uri)
    assert len(plain.list("r/")) == 20
    assert plain.get("r/29") == b"header" + bytes([29]) * 1000
    kinds = {"throttled", "timeout", "lost_reply", "duplicate", "torn", "expired"}
    assert all(faulty.injected[kind] >= 5 for kind in kinds)


CALLS: list[Callable[[ObjectStore], Any]] = [
    lambda store: store.create("new", b""),
    lambda store: store.put("k", b"1"),
    lambda store: store.put("k", bytes(9 << 20)),
    lambda store: store.get("k"),
    lambda store: store.get_range("k", 0, 1),
    lambda store: store.list(),
    lambda store: store.list_dirs(),
    lambda store: store.delete("k"),
    lambda store: store.delete_many(["k", "l"]),
]


@pytest.mark.parametrize("call", CALLS)
def test_expired_credentials_are_fetched_anew(
    unruly: Proxy,
    s3_env: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    fake_time: FakeTime,
    call: Callable[[ObjectStore], Any],
) -> None:
    uri = f"s3://{s3_env.bucket}/{uuid.uuid4().hex}"
    open_store(uri).put("k", b"1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "yesterdays-key")
    store = open_store(uri, retry=fake_time.policy())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_env.access_key)
    unruly.actions.append("expired")
    call(store)
    assert len(fake_time.sleeps) == 1


def test_head_learns_from_a_get_that_credentials_have_expired(
    unruly: Proxy, s3_env: S3Server, fake_time: FakeTime
) -> None:
    store = open_store(f"s3://{s3_env.bucket}/{uuid.uuid4().hex}", retry=fake_time.policy())
    store.put("k", b"12345")
    unruly.actions.extend(["expired", "expired"])
    assert store.head("k").size == 5
    assert len(fake_time.sleeps) == 1


def test_children_share_the_new_credentials(
    unruly: Proxy, s3_env: S3Server, monkeypatch: pytest.MonkeyPatch, fake_time: FakeTime
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "yesterdays-key")
    parent = open_store(f"s3://{s3_env.bucket}/{uuid.uuid4().hex}", retry=fake_time.policy())
    child = parent.child("below")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_env.access_key)
    unruly.actions.append("expired")
    child.put("k", b"1")
    assert parent.get("below/k") == b"1"
    assert len(fake_time.sleeps) == 1


def test_credentials_that_stay_expired_are_reported_after_bounded_retries(
    unruly: Proxy, s3_env: S3Server, fake_time: FakeTime
) -> None:
    store = open_store(f"s3://{s3_env.bucket}/x", retry=fake_time.policy(attempts=4))
    unruly.actions.extend(["expired"] * 4)
    with pytest.raises(ExpiredCredentialsError, match=r"ExpiredToken.*gave up after 4") as caught:
        store.get("k")
    assert isinstance(caught.value, DeniedError)
    assert "Renew" in (caught.value.fix or "")
    assert len(fake_time.sleeps) == 3


def test_credentials_that_cannot_be_renewed_leave_the_old_clients(
    unruly: Proxy,
    s3_env: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fake_time: FakeTime,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("boto3")
    store = open_store(f"s3://{s3_env.bucket}/x", retry=fake_time.policy())
    (tmp_path / "credentials").write_text("[work]\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    unruly.actions.append("expired")
    store.put("k", b"1")
    assert "no new credentials" in caplog.text
