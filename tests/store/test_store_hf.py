"""``hf://buckets/`` through the hub's S3 gateway: addresses, credentials, redirected downloads."""

from __future__ import annotations

import pytest
from fakes.hf_gateway import Gateway

from diloco_cloud.errors import DeniedError, NotFoundError
from diloco_cloud.store import RetryPolicy, open_store
from diloco_cloud.store.cloud_clients import HF_ENDPOINT

AT_ONCE = RetryPolicy(attempts=1, base_s=0.0)


def test_downloads_come_from_where_the_gateway_says(
    hf_env: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # is of s3:// alone
    store = open_store(hf_env.uri("redirected"), retry=AT_ONCE)
    before = hf_env.redirects
    data = bytes(range(256)) * 40_000
    store.create("a/b", data)
    assert store.get("a/b") == data
    assert bytes(store.get_range("a/b", 1000, 5000)) == data[1000:6000]
    assert hf_env.redirects == before + 2
    assert [info.key for info in store.list("a/")] == ["a/b"]
    store.delete("a/b")
    assert hf_env.refused == []


def test_wrong_key_is_denied(hf_env: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAother")
    with pytest.raises(DeniedError):
        open_store(hf_env.uri("denied"), retry=AT_ONCE).create("k", b"")


def test_bucket_of_another_namespace_is_not_found(hf_env: Gateway) -> None:
    store = open_store(f"hf://buckets/others/{hf_env.bucket}/p", retry=AT_ONCE)
    with pytest.raises(NotFoundError):
        store.create("k", b"")


def test_gateway_is_the_hubs_unless_another_is_named() -> None:
    assert HF_ENDPOINT == "https://s3.hf.co"
