"""Faults as part of a store's URI, which replicas get on their command line."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_cloud.errors import ConfigError, DilocoError
from diloco_cloud.store import (
    ObjectStore,
    RetryingStore,
    open_driver,
    open_store,
    parent_uri,
    run_name,
)
from diloco_cloud.store.faults import Faults, FaultyStore
from diloco_cloud.store.uris import plain_uri

EVERYTHING = Faults(
    seed=123,
    latency=0.05,
    throttled=0.05,
    timeout=0.05,
    lost_reply=0.05,
    duplicate=0.05,
    torn=0.05,
    expired=0.05,
    stale_list=0.05,
    stale_s=2.5,
    clock_skew_s=5.0,
)


@pytest.mark.parametrize(
    ("uri", "opened"),
    [
        ("faults+memory://x", "faults+memory://x"),
        ("faults+memory://x/a/?", "faults+memory://x/a"),
        ("FAULTS+memory://x?seed=1", "faults+memory://x?seed=1"),
        ("faults+s3://bucket/a/?torn=0.50", "faults+s3://bucket/a?torn=0.5"),
        ("faults+s3a://bucket?seed=0", "faults+s3://bucket"),
        ("faults+file:///data/a%20b?torn_visible=1", "faults+file:///data/a%20b?torn_visible=1"),
        ("faults+hf://buckets/me/name?seed=2", "faults+hf://buckets/me/name?seed=2"),
        (
            "faults+memory://x?partitions=10:20,30.5:40&partition_file=/tmp/cut-{rank}",
            "faults+memory://x?partitions=10:20,30.5:40&partition_file=%2Ftmp%2Fcut-{rank}",
        ),
    ],
)
def test_open_store_puts_faults_below_the_retries(uri: str, opened: str) -> None:
    store = open_store(uri)
    assert isinstance(store, RetryingStore)
    assert isinstance(open_driver(uri), FaultyStore)
    assert isinstance(store, ObjectStore)
    assert store.uri == opened
    assert open_store(opened).uri == opened


def test_uri_of_a_child_opens_it_with_the_same_faults() -> None:
    bucket = uuid.uuid4().hex
    child = open_driver(f"faults+memory://{bucket}/runs?{EVERYTHING.query()}").child("my-run")
    assert child.uri == f"faults+memory://{bucket}/runs/my-run?{EVERYTHING.query()}"
    again = open_driver(child.uri)
    assert isinstance(again, FaultyStore)
    assert again.faults == EVERYTHING
    open_driver(f"memory://{bucket}").put("runs/my-run/k", b"1")
    assert open_store(child.uri).get("k") == b"1"


def test_uri_with_every_fault_fits_into_an_argument() -> None:
    uri = f"faults+s3://my-training-bucket/experiments/{'r' * 40}?{EVERYTHING.query()}"
    assert len(uri) <= 256  # of SageMaker


@pytest.mark.parametrize(
    ("query", "message", "fix"),
    [
        ("throtled=0.1", "'throtled'", "Did you mean throttled?"),
        ("zzz=1", "'zzz'", "There are seed, latency"),
        ("throttled=often", "throttled=often", None),
        ("throttled=1.01", "probability", None),
        ("seed=1.5", "whole number", None),
        ("seed=1&seed=2", "twice", None),
        ("torn_visible=yes", "0 or 1", None),
        ("partitions=10-20", "START:END", None),
        ("partitions=20:10", "START:END", None),
        ("seed", "malformed", "NAME=VALUE"),
        ("seed=1&&torn=1", "malformed", "NAME=VALUE"),
        ("stale_list=0.1", "how stale", "stale_s"),
    ],
)
def test_open_store_refuses_a_query_it_does_not_understand(
    query: str, message: str, fix: str | None
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_store(f"faults+memory://x?{query}")
    assert (fix or "") in (caught.value.fix or "")


@pytest.mark.parametrize(
    "uri",
    [
        "faults+faults+memory://x",
        "faults+memory://",
        "faults+s3://key:secret-value@bucket/x?seed=1",
        "faults+s3://bucket/x?secret=secret-value",
        "faults+no-such-scheme://x?seed=1",
        "faults+s3:/bucket/x",
    ],
)
def test_open_store_refuses_a_faulty_uri_of_no_store(uri: str) -> None:
    with pytest.raises(DilocoError) as caught:
        open_store(uri)
    assert isinstance(caught.value, ConfigError)
    assert "secret-value" not in str(caught.value)


def test_query_of_a_plain_path_is_part_of_its_name(tmp_path: Path) -> None:
    store = open_store(tmp_path / "what?seed=1")
    store.put("k", b"1")
    assert (tmp_path / "what?seed=1" / "k").read_bytes() == b"1"


@pytest.mark.parametrize(
    ("uri", "name", "parent"),
    [
        ("s3://bucket/runs/one", "one", "s3://bucket/runs"),
        ("s3://bucket/runs/one/", "one", "s3://bucket/runs"),
        ("/data/why?/one", "one", "/data/why?"),
        ("faults+s3://bucket/one", "one", "faults+s3://bucket"),
        ("faults+s3://b/runs/one?seed=1", "one", "faults+s3://b/runs?seed=1"),
        ("faults+s3://b/one?partition_file=/a/b", "one", "faults+s3://b?partition_file=/a/b"),
    ],
)
def test_name_and_parent_of_a_run_are_in_the_path(uri: str, name: str, parent: str) -> None:
    assert run_name(uri) == name
    assert parent_uri(uri) == parent


@pytest.mark.parametrize("query", ["", "?seed=1", "?partition_file=%2Ftmp%2Fcut-{rank}"])
def test_name_of_a_run_is_the_same_with_the_slash_that_some_callers_add(query: str) -> None:
    assert run_name(f"faults+memory://x/one{query}/") == "one"


@pytest.mark.parametrize("query", ["", "?seed=1"])
def test_plain_uri_leaves_the_faults_out(query: str) -> None:
    assert plain_uri(f"faults+file:///data/run{query}") == "file:///data/run"
    assert plain_uri("/data/run?") == "/data/run?"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"throttled": 1.5}, r"throttled=1\.5"),
        ({"torn": -0.1}, "probability"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"latency": -1.0}, "latency"),
        ({"latency": float("inf")}, "latency"),
        ({"partitions": ((5.0, 5.0),)}, "partitions"),
        ({"expiries": ((-1.0, 5.0),)}, "expiries"),
        ({"stale_list": 0.5}, "how stale"),
    ],
)
def test_faults_refuse_settings_that_mean_nothing(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Faults(**settings)


_PROBABILITY = st.floats(0, 1)
_AMOUNT = st.floats(0, 1e9)
_WINDOW = st.tuples(st.floats(0, 1e6), st.floats(0.001, 1e6)).map(lambda w: (w[0], w[0] + w[1]))


@given(
    st.builds(
        Faults,
        seed=st.integers(),
        latency=_AMOUNT,
        throttled=_PROBABILITY,
        torn=_PROBABILITY,
        torn_visible=st.booleans(),
        expiries=st.lists(_WINDOW, max_size=3).map(tuple),
        stale_list=_PROBABILITY,
        stale_n=st.integers(1, 100),
        partitions=st.lists(_WINDOW, max_size=3).map(tuple),
        partition_file=st.text(),
    )
)
def test_query_round_trips(faults: Faults) -> None:
    assert Faults.parse(faults.query()) == faults
