"""What a user is told when an S3 store says no, from a real server wherever one says it."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from fake_time import FakeTime
from helpers_http import proxy
from obstore.exceptions import GenericError
from servers import S3Server, free_ports

from diloco_cloud.errors import (
    AlreadyExistsError,
    CorruptError,
    DeniedError,
    ExpiredCredentialsError,
    NotFoundError,
    StoreError,
    ThrottledError,
    UnreachableError,
)
from diloco_cloud.store import ObjectStore, RetryPolicy, cloud, cloud_clients, open_store
from diloco_cloud.store.cloud_errors import from_response, store_error
from diloco_cloud.store.filesystem import FilesystemStore

ONCE = RetryPolicy(attempts=1)
CALLS: list[Callable[[ObjectStore], Any]] = [
    lambda store: store.create("k", b""),
    lambda store: store.put("k", b""),
    lambda store: store.get("k"),
    lambda store: store.get_range("k", 0, 1),
    lambda store: store.head("k"),
    lambda store: store.list(),
    lambda store: store.list_dirs(),
    lambda store: store.delete("k"),
    lambda store: store.delete_many(["k", "l"]),
]


@pytest.mark.parametrize("call", CALLS)
def test_missing_bucket_is_not_found(
    s3_env: S3Server, call: Callable[[ObjectStore], object]
) -> None:
    with pytest.raises(NotFoundError):
        call(open_store("s3://no-such-bucket/x", retry=ONCE))


def test_missing_bucket_is_named_with_what_to_do(s3_env: S3Server) -> None:
    with pytest.raises(NotFoundError, match="bucket s3://no-such-bucket does not exist") as caught:
        open_store("s3://no-such-bucket/x").list()
    assert "Create the bucket" in (caught.value.fix or "")


@pytest.mark.parametrize("call", CALLS)
def test_wrong_secret_is_denied_and_stays_secret(
    s3_env: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[ObjectStore], object],
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-value")
    store = open_store(f"s3://{s3_env.bucket}/x", retry=ONCE)
    with pytest.raises(DeniedError) as caught:
        call(store)
    error: BaseException | None = caught.value
    assert isinstance(error, PermissionError)
    while error is not None:
        assert "wrong-secret-value" not in f"{error}{error!r}"
        error = error.__cause__


def test_unknown_access_key_is_denied(s3_env: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(DeniedError, match="InvalidAccessKeyId"):
        open_store(f"s3://{s3_env.bucket}/x").put("k", b"")


@pytest.mark.parametrize("call", CALLS)
def test_unreachable_server_is_reported_after_bounded_retries(
    s3_env: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[ObjectStore], object],
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_ports(1)[0]}")
    fake_time = FakeTime()
    store = open_store(f"s3://{s3_env.bucket}/x", retry=fake_time.policy(attempts=4))
    with pytest.raises(UnreachableError, match=r"connection refused.*4 attempts") as caught:
        call(store)
    assert isinstance(caught.value, ConnectionError)
    assert len(fake_time.sleeps) == 3


@pytest.fixture
def silent_endpoint() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("call", CALLS)
def test_silent_server_is_unreachable(
    s3_env: S3Server,
    silent_endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[ObjectStore], object],
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", silent_endpoint)
    monkeypatch.setattr(cloud_clients, "_SILENCE", timedelta(milliseconds=100))
    with pytest.raises(UnreachableError, match="timeout"):
        call(open_store(f"s3://{s3_env.bucket}/x", retry=ONCE))


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (301, DeniedError),
        (400, StoreError),
        (401, DeniedError),
        (403, DeniedError),
        (404, NotFoundError),
        (409, AlreadyExistsError),
        (412, AlreadyExistsError),
        (416, CorruptError),
        (429, ThrottledError),
        (500, UnreachableError),
        (502, UnreachableError),
        (503, ThrottledError),
        (504, UnreachableError),
    ],
)
def test_http_status_decides_the_error(
    s3_env: S3Server, monkeypatch: pytest.MonkeyPatch, status: int, kind: type[StoreError]
) -> None:
    with proxy(s3_env.endpoint) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.endpoint)
        store = open_store(f"s3://{s3_env.bucket}/x", retry=ONCE)
        for call in (lambda: store.create("k", b""), lambda: store.get("k"), store.list):
            between.actions.append(status)
            with pytest.raises(StoreError) as caught:
                call()
            assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("status", "code", "kind", "fix"),
    [
        (400, "ExpiredToken", ExpiredCredentialsError, "Renew"),
        (403, "RequestExpired", ExpiredCredentialsError, "Renew"),
        (400, "AuthorizationHeaderMalformed", DeniedError, "AWS_REGION"),
        (301, "PermanentRedirect", DeniedError, "AWS_REGION"),
        (403, "RequestTimeTooSkewed", DeniedError, "clock"),
        (403, "SignatureDoesNotMatch", DeniedError, "secret key"),
        (400, "RequestTimeout", UnreachableError, None),
        (409, "ConditionalRequestConflict", ThrottledError, None),
        (409, "OperationAborted", ThrottledError, None),
        (409, "BlobAlreadyExists", AlreadyExistsError, None),
        (404, "ContainerNotFound", NotFoundError, "Create the bucket"),
        (0, "AccessDenied", DeniedError, "credentials"),
        (0, "SlowDown", ThrottledError, None),
    ],
)
def test_the_clouds_own_code_refines_the_status(
    status: int, code: str, kind: type[StoreError], fix: str | None
) -> None:
    error = from_response(status, code, "s3://bucket/k")
    assert type(error) is kind
    assert (error.fix is None) if fix is None else (fix in (error.fix or ""))


OWN_CREDENTIALS = [
    ("s3://bucket/k", ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "`aws sso login`")),
    (
        "gs://bucket/k",
        ("GOOGLE_APPLICATION_CREDENTIALS", "`gcloud auth application-default login`"),
    ),
    ("az://c/k", ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN", "`az login`")),
    ("hf://buckets/me/b/k", ("AWS_SECRET_ACCESS_KEY", "S3 keys of the hub", "HF_TOKEN")),
]


@pytest.mark.parametrize(("uri", "named"), OWN_CREDENTIALS)
def test_who_has_no_credentials_is_told_which_this_store_takes(
    uri: str, named: tuple[str, ...]
) -> None:
    error = store_error(
        GenericError(
            "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in "
            "1s - HTTP error: error sending request\n\nDebug source:\nGeneric {}"
        ),
        uri,
    )
    refused = from_response(403, "AccessDenied", uri)
    expired = from_response(400, "ExpiredToken", uri)
    for one in (error, refused, expired):
        assert isinstance(one, DeniedError)
        fix = one.fix or ""
        assert all(name in fix for name in named), fix
        others = {"AWS_", "AZURE_", "GOOGLE_"} - {named[0].partition("_")[0] + "_"}
        assert not any(name in fix for name in others), fix


def test_unknown_errors_show_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_TOKEN", "tok-123456789")
    error = store_error(
        GenericError("odd: tok-123456789 at https://user:pw@host/k?X-Amz-Signature=abc"),
        "s3://bucket/k",
    )
    for secret in ("tok-123456789", "user:pw", "abc"):
        assert secret not in str(error)


def test_object_larger_than_one_put_is_refused_before_it_is_sent(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud, "MAX_OBJECT_BYTES", 1000)
    store = open_store(s3_uri)
    with pytest.raises(StoreError, match="more than one PUT may carry"):
        store.create("k", [bytes(600), bytes(600)])
    assert store.list() == []


FORKER = """
import os, signal, sys
from diloco_cloud.errors import StoreError
from diloco_cloud.store import open_store
store = open_store(sys.argv[1])
store.put("k", b"1")
child = os.fork()
if child == 0:
    signal.alarm(10)
    try:
        open_store(sys.argv[1]).get("k")
    except StoreError as error:
        os._exit(7 if "forked" in str(error) else 8)
    os._exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert store.get("k") == b"1"
"""


def test_forked_child_is_refused_instead_of_hanging(s3_uri: str) -> None:
    subprocess.run([sys.executable, "-c", FORKER, s3_uri], timeout=60, check=True)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionResetError(errno.ECONNRESET, "reset"), UnreachableError),
        (TimeoutError(), UnreachableError),
        (PermissionError(errno.EACCES, "no"), DeniedError),
        (type("NoCredentialsError", (Exception,), {})("none"), DeniedError),
        (type("EndpointConnectionError", (Exception,), {})("none"), UnreachableError),
        (RuntimeError("something else"), StoreError),
    ],
)
def test_filesystem_errors_become_store_errors(
    s3_env: S3Server,
    s3fs_filesystem: Any,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kind: type[StoreError],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    store = FilesystemStore(s3fs_filesystem, f"{s3_env.bucket}/{uuid.uuid4().hex}")
    monkeypatch.setattr(s3fs_filesystem, "cat_file", fail)
    with pytest.raises(StoreError) as caught:
        store.get("k")
    assert type(caught.value) is kind


def test_filesystem_tells_a_missing_bucket_and_a_wrong_secret(s3_env: S3Server) -> None:
    from s3fs import S3FileSystem

    options = {"endpoint_url": s3_env.endpoint, "region_name": "us-east-1"}
    right = S3FileSystem(
        key=s3_env.access_key,
        secret=s3_env.secret_key,
        client_kwargs=options,
        skip_instance_cache=True,
    )
    with pytest.raises(NotFoundError, match="bucket"):
        FilesystemStore(right, "no-such-bucket/x").put("k", b"")
    wrong = S3FileSystem(
        key=s3_env.access_key, secret="wrong", client_kwargs=options, skip_instance_cache=True
    )
    with pytest.raises(DeniedError):
        FilesystemStore(wrong, f"{s3_env.bucket}/x").create("k", b"")
