"""From URIs to stores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from servers import S3Server

from diloco_cloud.errors import (
    ConfigError,
    DeniedError,
    MissingDependencyError,
    UnreachableError,
)
from diloco_cloud.store import ObjectStore, open_store
from diloco_cloud.store.directory import DirectoryStore
from diloco_cloud.store.memory import MemoryStore
from diloco_cloud.store.opening import check_uri
from diloco_cloud.store.retry import RetryingStore


@pytest.mark.parametrize(
    ("uri", "kind", "opened"),
    [
        ("/data/runs/", DirectoryStore, "file:///data/runs"),
        (Path("/data/runs"), DirectoryStore, "file:///data/runs"),
        ("file:///data/a%20b", DirectoryStore, "file:///data/a%20b"),
        ("memory://name", MemoryStore, "memory://name"),
        ("memory://name/a/b/", MemoryStore, "memory://name/a/b"),
        ("s3://bucket", RetryingStore, "s3://bucket"),
        ("s3://bucket/a/b/", RetryingStore, "s3://bucket/a/b"),
        ("s3a://bucket/a", RetryingStore, "s3://bucket/a"),
        ("hf://buckets/me/name/a", RetryingStore, "hf://buckets/me/name/a"),
        ("hf://buckets/me/name", RetryingStore, "hf://buckets/me/name"),
    ],
)
def test_open_store_knows_the_scheme(uri: str | Path, kind: type, opened: str) -> None:
    store = open_store(uri)
    assert isinstance(store, kind)
    assert isinstance(store, ObjectStore)
    assert store.uri == opened


def test_open_store_of_azure_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert open_store("az://container/a").uri == "az://container/a"
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(ConfigError, match="az://container") as caught:
        open_store("az://container/a")
    assert "Set AZURE_STORAGE_ACCOUNT_NAME" in (caught.value.fix or "")


def test_check_uri_connects_to_nobody_and_knows_what_cannot_be_opened() -> None:
    for uri in (
        "/data/runs",
        "s3://bucket/a",
        "ftp://127.0.0.1:1/x",
        "gcs://b/a",
        "faults+memory://x?seed=1",
    ):
        check_uri(uri)
    for uri in ("nope://x", "faults+nope://x", "faults+ftp://h/x?sed=1", "ftp://h/a//b", "s3:/b"):
        with pytest.raises(ConfigError):
            check_uri(uri)


def test_open_store_reads_aws_profiles(
    s3_env: S3Server, s3_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3")
    profiles = tmp_path / "credentials"
    profiles.write_text(
        f"[work]\naws_access_key_id={s3_env.access_key}\n"
        f"aws_secret_access_key={s3_env.secret_key}\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profiles))
    monkeypatch.setenv("AWS_PROFILE", "work")
    store = open_store(s3_uri)
    store.put("k", b"1")
    assert store.get("k") == b"1"
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(DeniedError, match="profile"):
        open_store(s3_uri)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://AKIAEXAMPLE:secret-value@bucket/x",
        "s3://secret-value@bucket/x",
        "s3://bucket/x?secret=secret-value",
        "https://host/x?sig=secret-value",
        "sftp://me:secret-value@host/x",
        "memory://name#secret-value",
    ],
)
def test_open_store_refuses_credentials_without_repeating_them(uri: str) -> None:
    with pytest.raises(ConfigError, match="environment") as caught:
        open_store(uri)
    assert "secret-value" not in str(caught.value)


@pytest.mark.parametrize("uri", ["hf://datasets/me/data", "hf://me/model", "hf://buckets/me"])
def test_open_store_refuses_hub_repositories_and_says_why(uri: str) -> None:
    with pytest.raises(ConfigError, match="git commit") as caught:
        open_store(uri)
    assert "hf://buckets/" in (caught.value.fix or "")


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "no-such-scheme://x/y",
        "s3://",
        "s3:///prefix",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "memory://",
        "file://host/x",
        "s3://[",
    ],
)
def test_open_store_refuses_what_names_no_store(uri: str) -> None:
    with pytest.raises(ConfigError):
        open_store(uri)


@pytest.mark.parametrize(
    ("uri", "meant"),
    [("s3:/bucket/x", "s3://bucket/x"), ("file:/data", "file:///data"), ("gs:/b", "gs://b")],
)
def test_open_store_refuses_a_uri_that_lost_a_slash(uri: str, meant: str) -> None:
    with pytest.raises(ConfigError, match="a slash is missing") as caught:
        open_store(uri)
    assert meant in (caught.value.fix or "")


def test_open_store_takes_a_path_with_a_colon(tmp_path: Path) -> None:
    assert open_store(tmp_path / "a:" / "b").uri.endswith("/a%3A/b")


def test_open_store_whose_host_does_not_answer_is_unreachable() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(UnreachableError, match=r"ftp://127\.0\.0\.1:1/x cannot be reached"):
        open_store("ftp://127.0.0.1:1/x")


@pytest.mark.parametrize(
    ("uri", "package", "extra"),
    [
        ("s3://bucket/x", "obstore", "diloco-cloud[s3]"),
        ("gs://bucket/x", "obstore", "diloco-cloud[gcs]"),
        ("az://bucket/x", "obstore", "diloco-cloud[azure]"),
        ("ftp://host/x", "fsspec", "diloco-cloud[fsspec]"),
    ],
)
def test_open_store_names_the_extra_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, uri: str, package: str, extra: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    for name in ("cloud", "filesystem"):
        monkeypatch.delitem(sys.modules, f"diloco_cloud.store.{name}", raising=False)
    with pytest.raises(MissingDependencyError, match=package) as caught:
        open_store(uri)
    assert extra in (caught.value.fix or "")
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ImportError)


def test_importing_the_store_loads_no_client() -> None:
    script = (
        "import sys, diloco_cloud.store as s; s.open_store('/x'); s.open_store('memory://x');"
        "print([m for m in ('obstore', 'fsspec', 'torch', 'boto3') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
