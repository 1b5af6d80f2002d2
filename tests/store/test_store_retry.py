"""Retries: bounded, and never taking one's own write for another's."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator

import pytest
from fake_time import FakeTime
from helpers_http import Proxy, proxy
from servers import S3Server

from diloco_cloud.errors import (
    AlreadyExistsError,
    DeniedError,
    NotFoundError,
    StoreError,
    ThrottledError,
    UnreachableError,
)
from diloco_cloud.store import ObjectStore, RetryingStore, RetryPolicy, open_store


@pytest.fixture
def fake_time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def unruly(s3_env: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the S3 server, to which the environment now points."""
    with proxy(s3_env.endpoint) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.endpoint)
        yield between


@pytest.fixture
def store(unruly: Proxy, s3_env: S3Server, fake_time: FakeTime) -> ObjectStore:
    uri = f"s3://{s3_env.bucket}/{uuid.uuid4().hex}"
    return open_store(uri, retry=fake_time.policy(attempts=5))


def test_policy_backs_off_exponentially_up_to_its_cap(fake_time: FakeTime) -> None:
    policy = fake_time.policy(attempts=6, base_s=1.0, cap_s=5.0)

    def fail() -> None:
        raise UnreachableError("no answer", fix="wait")

    with pytest.raises(UnreachableError, match="gave up after 6 attempts in 17 s") as caught:
        policy.call(fail)
    assert fake_time.sleeps == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert caught.value.fix == "wait"


def test_policy_says_that_it_retries(fake_time: FakeTime, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise UnreachableError("no answer")

    with pytest.raises(UnreachableError):
        fake_time.policy(attempts=2, base_s=1.0).call(fail)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == "no answer; retrying in 1.0 s (attempt 2 of 2)"


def test_policy_keeps_its_deadline(fake_time: FakeTime) -> None:
    policy = fake_time.policy(attempts=100, base_s=1.0, cap_s=8.0, deadline_s=20.0)

    def fail() -> None:
        raise ThrottledError("slow down")

    with pytest.raises(ThrottledError):
        policy.call(fail)
    assert fake_time.now - 1000.0 <= 20.0
    assert fake_time.sleeps == [1.0, 2.0, 4.0, 8.0]


def test_policy_jitter_is_full_and_leaves_the_global_generator_alone() -> None:
    waits: list[float] = []
    policy = RetryPolicy(attempts=200, base_s=1.0, cap_s=1.0, sleep=waits.append, deadline_s=1e9)
    random.seed(7)
    before = random.getstate()

    def fail() -> None:
        raise ThrottledError("slow down")

    with pytest.raises(ThrottledError):
        policy.call(fail)
    assert random.getstate() == before
    assert 0.0 <= min(waits) < 0.2
    assert 0.8 < max(waits) <= 1.0


@pytest.mark.parametrize(
    "error",
    [StoreError("no space"), DeniedError("no"), NotFoundError("no"), AlreadyExistsError("yes")],
)
def test_policy_raises_what_waiting_cannot_cure_at_once(
    fake_time: FakeTime, error: StoreError
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        fake_time.policy().call(fail)
    assert caught.value is error
    assert fake_time.sleeps == []


def test_policy_refuses_to_never_try() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RetryPolicy(attempts=0)


@pytest.mark.parametrize("status", [503, 429, 500])
def test_every_operation_survives_a_refusal(
    store: ObjectStore, unruly: Proxy, fake_time: FakeTime, status: int
) -> None:
    unruly.actions.extend([status, status])
    store.create("a/k", b"12345")
    for call in (
        lambda: store.put("a/k", b"12345"),
        lambda: store.get("a/k"),
        lambda: store.get_range("a/k", 1, 2),
        lambda: store.head("a/k"),
        lambda: store.list(),
        lambda: store.list_dirs(),
        lambda: store.delete("a/k"),
        lambda: store.delete_many(iter(["a/k", "b"])),
    ):
        unruly.actions.append(status)
        call()
        assert not unruly.actions
    assert len(fake_time.sleeps) == 10


@pytest.mark.parametrize("action", ["lose_request", "lose_reply"])
def test_every_operation_survives_a_lost_connection(
    store: ObjectStore, unruly: Proxy, action: str
) -> None:
    for call, expected in (
        (lambda: store.create("a/k", [b"12", b"345"]), None),
        (lambda: store.put("a/k", b"12345"), None),
        (lambda: store.get("a/k"), b"12345"),
        (lambda: store.get_range("a/k", 1, 2), b"23"),
        (lambda: store.head("a/k").size, 5),
        (lambda: [info.key for info in store.list()], ["a/k"]),
        (lambda: store.list_dirs(), ["a"]),
        (lambda: store.delete("a/k"), None),
    ):
        unruly.actions.append(action)  # type: ignore[arg-type]
        assert call() == expected
        assert not unruly.actions


def test_create_whose_reply_was_lost_is_a_success(store: ObjectStore, unruly: Proxy) -> None:
    unruly.actions.extend(["lose_reply", 503, "pass"])
    store.create("k", [b"mine", b"!" * (1 << 20)])
    assert store.get("k") == b"mine" + b"!" * (1 << 20)


@pytest.mark.parametrize("theirs", [b"their", b"their bytes are longer"])
def test_create_whose_request_was_lost_does_not_claim_anothers_object(
    store: ObjectStore, unruly: Proxy, s3_env: S3Server, theirs: bytes
) -> None:
    store.put("k", theirs)
    unruly.actions.append("lose_request")
    with pytest.raises(AlreadyExistsError):
        store.create("k", b"mine!")
    assert store.get("k") == theirs


def test_create_that_was_only_throttled_does_not_claim_an_equal_object(
    store: ObjectStore, unruly: Proxy
) -> None:
    store.put("k", b"same")
    unruly.actions.append(503)
    with pytest.raises(AlreadyExistsError):
        store.create("k", b"same")


def test_create_met_by_an_equal_object_at_once_is_taken(store: ObjectStore) -> None:
    store.create("k", b"same")
    with pytest.raises(AlreadyExistsError):
        store.create("k", b"same")


def test_retries_end(store: ObjectStore, unruly: Proxy, fake_time: FakeTime) -> None:
    unruly.actions.extend([503] * 20)
    with pytest.raises(ThrottledError, match="gave up after 5 attempts"):
        store.get("k")
    assert len(unruly.seen) == 5
    assert len(fake_time.sleeps) == 4


def test_children_retry_too(store: ObjectStore, unruly: Proxy) -> None:
    child = store.child("below")
    assert isinstance(child, RetryingStore)
    unruly.actions.append(500)
    child.put("k", b"1")
    assert store.get("below/k") == b"1"
