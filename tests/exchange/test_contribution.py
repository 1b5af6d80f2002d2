"""The format of a round's objects: pinned, checked, and safe to read from anybody."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco_cloud.errors import CorruptContributionError
from diloco_cloud.exchange.contribution import (
    MAGIC,
    Header,
    checksums,
    decode,
    digest,
    header_size,
)
from diloco_cloud.exchange.payloads import read_header
from diloco_cloud.exchange.signing import Signer
from diloco_cloud.store import open_store

PAYLOAD = bytes(range(256)) * 10
HEADER = Header(
    kind="contribution",
    run="r",
    round=3,
    fragment=1,
    rank=2,
    attempt=0,
    nbytes=len(PAYLOAD),
    chunk_bytes=1000,
    checksums=checksums([memoryview(PAYLOAD)], 1000),
)


def test_header_round_trips() -> None:
    assert decode(HEADER.encode(), "k") == HEADER
    assert len(HEADER.encode()) == HEADER.size == header_size(len(PAYLOAD), 1000)


@pytest.mark.parametrize("cuts", [[2560], [1, 2559], [999, 1, 1000, 560], [0, 2560]])
def test_checksums_do_not_depend_on_how_the_payload_is_cut(cuts: list[int]) -> None:
    views, at = [], 0
    for size in cuts:
        views.append(memoryview(PAYLOAD)[at : at + size])
        at += size
    assert checksums(views, 1000) == HEADER.checksums


def test_verify_finds_the_damaged_chunk() -> None:
    HEADER.verify(0, memoryview(PAYLOAD)[:1000], "k")
    HEADER.verify(1, memoryview(PAYLOAD)[1000:2000], "k")
    damaged = bytearray(PAYLOAD)
    damaged[1500] ^= 1
    with pytest.raises(CorruptContributionError, match="chunk 1 is damaged"):
        HEADER.verify(1, memoryview(damaged)[1000:2000], "k")


@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": -1},
        {"nbytes": 10**12},
        {"nbytes": 10**400},
        {"tokens": 10**50},
        {"norm": 10**400},
        {"sizes": [1, 1, 1]},
        {"codec": "int8"},
        {"chunk_bytes": 12},
        {"nbytes": "9"},
        {"rank": True},
        {"chunk_bytes": 0},
        {"kind": "pickle"},
        {"checksums": ""},
        {"extra": 1},
    ],
)
def test_decode_refuses_fields_that_cannot_be(change: dict[str, object]) -> None:
    text = json.dumps(asdict(HEADER) | change).encode()
    data = (MAGIC + len(text).to_bytes(4, "little") + text).ljust(HEADER.size)
    with pytest.raises(CorruptContributionError):
        decode(data, "k")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text('a0"\\é', max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


# A busy machine is not what is tested.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(asdict(HEADER))), JSON, max_size=4))
def test_decode_of_any_fields_is_a_header_or_one_error(changes: dict[str, object]) -> None:
    text = json.dumps(asdict(HEADER) | changes).encode()
    try:
        header = decode((MAGIC + len(text).to_bytes(4, "little") + text).ljust(HEADER.size), "k")
    except CorruptContributionError:
        return
    assert 0 <= header.nbytes <= 2**53
    assert header.chunk_bytes >= 64


@pytest.mark.parametrize("note", ["é" * 800, "\ud800"])
def test_a_header_that_cannot_be_written_again_is_nobodys(note: str) -> None:
    """Its text had room as somebody else wrote it; in a signed run it is written again."""
    text = json.dumps(asdict(replace(HEADER, note=note, mac=note)), ensure_ascii=note != "é" * 800)
    raw = text.encode()
    data = (MAGIC + len(raw).to_bytes(4, "little") + raw).ljust(HEADER.size)
    with pytest.raises(CorruptContributionError):
        decode(data, "k").check(Signer(b"k" * 32, "r"), "k")


@given(st.binary(max_size=200))
def test_decode_of_any_json_bytes_is_one_error(data: bytes) -> None:
    with pytest.raises(CorruptContributionError):
        decode((MAGIC + len(data).to_bytes(4, "little") + data).ljust(HEADER.size), "k")


@given(st.integers(0, HEADER.size - 1), st.integers(0, 255))
def test_decode_of_a_changed_byte_never_escapes(position: int, value: int) -> None:
    data = bytearray(HEADER.encode())
    data[position] = value
    try:
        header = decode(bytes(data), "k")
    except CorruptContributionError:
        return
    assert header.size <= HEADER.size + 64


@pytest.mark.parametrize("guess", [0, 10, HEADER.size, 10**7])
def test_read_header_finds_it_whatever_size_was_expected(guess: int) -> None:
    store = open_store(f"memory://header-{guess}")
    store.put("o", [HEADER.encode(), PAYLOAD])
    size = store.head("o").size
    header, name = read_header(store, "o", guess, size=size)
    assert header == HEADER
    assert name == read_header(store, "o", HEADER.size)[1] == digest(HEADER.encode())


def test_read_header_refuses_a_truncated_object() -> None:
    store = open_store("memory://truncated")
    store.put("o", [HEADER.encode(), PAYLOAD[:-1]])
    with pytest.raises(CorruptContributionError, match="truncated"):
        read_header(store, "o", HEADER.size, size=store.head("o").size)
    for size in (None, 2):
        store.put("o", b"no")
        with pytest.raises(CorruptContributionError):
            read_header(store, "o", HEADER.size, size=size)


def test_read_header_does_not_allocate_what_a_forged_length_asks_for() -> None:
    store = open_store("memory://forged")
    store.put("o", MAGIC + (2**32 - 1).to_bytes(4, "little") + b"{}")
    with pytest.raises(CorruptContributionError):
        read_header(store, "o", HEADER.size, size=14)


def test_header_with_long_names_still_fits() -> None:
    long = replace(HEADER, run="r" * 40, base="f" * 64, layout="f" * 32, tokens=10**15)
    assert decode(long.encode(), "k") == long
