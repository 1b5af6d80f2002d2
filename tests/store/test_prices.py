"""What requests and traffic cost at list prices."""

from __future__ import annotations

import uuid
from collections import Counter

import pytest

from diloco_cloud.store import open_store
from diloco_cloud.store.metered import MeteredStore, Usage
from diloco_cloud.store.prices import GB, LISTED, cost, list_prices


def test_cost_of_amazons_own_units_is_what_it_lists() -> None:
    a_thousand_puts = Usage(Counter({"create": 400, "put": 600}))
    a_thousand_lists = Usage(Counter({"list": 999, "list_dirs": 1}))
    a_thousand_gets = Usage(Counter({"get": 1, "get_range": 990, "head": 9}))
    a_gigabyte_down = Usage(bytes_received=GB)
    assert cost(a_thousand_puts, "s3://b/run") == pytest.approx(0.005)
    assert cost(a_thousand_lists, "s3://b/run") == pytest.approx(0.005)
    assert cost(a_thousand_gets, "s3://b/run") == pytest.approx(0.0004)
    assert cost(a_gigabyte_down, "s3://b/run") == pytest.approx(0.09)


def test_cost_sums_googles_worked_example() -> None:
    # cloud.google.com/storage/pricing-examples: $0.05 + $0.02 + $0.12, and $1.00 of storage.
    usage = Usage(Counter({"create": 5000, "list": 5000, "get": 50_000}), bytes_received=GB)
    assert cost(usage, "gs://bucket") == pytest.approx(0.19)
    assert LISTED["gs"].storage(50 * GB, 30 * 24 * 3600) == pytest.approx(1.00)


def test_cost_of_writing_and_deleting_is_that_of_the_requests_alone() -> None:
    usage = Usage(Counter({"put": 1, "delete": 10**6, "delete_many": 10**6}), bytes_sent=10**15)
    assert cost(usage, "s3://b") == pytest.approx(0.005 / 1000)


def test_cost_of_traffic_is_nothing_within_the_region() -> None:
    usage = Usage(Counter({"get": 1}), bytes_received=1000 * GB)
    assert cost(usage, "s3://b", same_region=True) == pytest.approx(4e-7)
    assert cost(usage, "s3://b") == pytest.approx(90 + 4e-7)


@pytest.mark.parametrize(
    "uri",
    ["/data/runs", "file:///data/runs", "memory://here", "sftp://host/runs", "", "r2://b", "C:\\r"],
)
def test_cost_is_unknown_without_a_published_price(uri: str) -> None:
    assert list_prices(uri) is None
    assert cost(Usage(Counter({"put": 10**6}), bytes_received=10**12), uri) is None


@pytest.mark.parametrize(
    ("endpoint", "provider"),
    [
        (None, "Amazon"),
        ("https://s3.us-west-2.amazonaws.com", "Amazon"),
        ("https://0123.r2.cloudflarestorage.com", "Cloudflare"),
        ("https://0123.eu.r2.cloudflarestorage.com/", "Cloudflare"),
    ],
)
def test_prices_follow_the_endpoint(endpoint: str | None, provider: str) -> None:
    prices = list_prices("s3://bucket/run", endpoint)
    assert prices is not None
    assert prices.provider.startswith(provider)


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://127.0.0.1:8333",
        "https://minio.example.com",
        "https://s3.cn-north-1.amazonaws.com.cn",
        "https://amazonaws.com.evil.example",
        "http://[",
        "not a URL",
    ],
)
def test_prices_of_other_servers_are_not_amazons(endpoint: str) -> None:
    assert list_prices("s3://bucket/run", endpoint) is None


@pytest.mark.parametrize(
    ("uri", "key"),
    [
        ("s3a://b", "s3"),
        ("gcs://b/c", "gs"),
        ("az://container/run", "az"),
        ("hf://buckets/me/runs/run", "hf"),
        ("faults+s3://b/run?seed=1&throttled=0.1", "s3"),
        ("S3://b", "s3"),
    ],
)
def test_prices_are_found_by_any_name_of_the_store(uri: str, key: str) -> None:
    assert list_prices(uri) is LISTED[key]


def test_an_endpoint_is_only_of_s3() -> None:
    assert list_prices("gs://b", "http://127.0.0.1:8333") is LISTED["gs"]


@pytest.mark.parametrize("key", sorted(LISTED))
def test_prices_say_where_they_are_from(key: str) -> None:
    prices = LISTED[key]
    assert prices.source.startswith("https://")
    assert prices.seen >= "2026-11-20"
    # No provider lists a million reads above its million writes, or a write above a cent.
    assert 0 <= prices.read <= prices.write < 0.01


def test_cost_covers_every_call_of_a_store() -> None:
    store = MeteredStore(open_store(f"memory://{uuid.uuid4().hex}"))
    store.create("a", b"1")
    store.put("b", b"2")
    store.get("a")
    store.get_range("a", 0, 1)
    store.head("a")
    store.list()
    store.list_dirs()
    store.delete("a")
    store.delete_many(["b"])
    writes_and_lists, reads = 4, 3
    assert cost(store.usage, "s3://b", same_region=True) == pytest.approx(
        writes_and_lists * 5e-6 + reads * 4e-7
    )
