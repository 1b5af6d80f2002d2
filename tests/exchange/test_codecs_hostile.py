"""Decoders read what anybody may have written: they say what is wrong, or decode, and no more."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random

import pytest
import torch
from codec_hostile import decode_anything
from codec_values import KINDS, chunks, values_of
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cloud.errors import CorruptContributionError
from diloco_cloud.exchange.codecs import get_codec

CODECS = ["fp32", "bf16", "int8", "e3m0", "e2m1", "sparse"]

fuzzed = settings(max_examples=60)


@pytest.mark.parametrize("name", CODECS)
@fuzzed
@given(data=st.binary(max_size=600), numel=st.integers(0, 300))
def test_decoder_survives_random_bytes(name: str, data: bytes, numel: int) -> None:
    decode_anything(get_codec(name), data, numel)


@pytest.mark.parametrize("name", CODECS)
@fuzzed
@given(random=st.randoms(use_true_random=False), numel=st.integers(0, 5000))
def test_decoder_survives_random_bytes_of_the_right_length(
    name: str, random: Random, numel: int
) -> None:
    codec = get_codec(name)
    values = decode_anything(codec, random.randbytes(codec.longest(numel)), numel)
    assert name == "sparse" or values is not None


# -- changes to valid chunks -----------------------------------------------------------------------

#: What a length field may be made to say, besides what it says and one more or less.
_COUNTS = [0, 1, 2**15, 2**16 - 1, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1]


def _flip(draw: st.DrawFn, data: bytearray) -> None:
    if data:
        data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))


def _truncate(draw: st.DrawFn, data: bytearray) -> None:
    del data[draw(st.integers(0, len(data))) :]


def _cut(draw: st.DrawFn, data: bytearray) -> None:
    start = draw(st.integers(0, len(data)))
    del data[start : start + draw(st.integers(1, 40))]


def _insert(draw: st.DrawFn, data: bytearray) -> None:
    at = draw(st.integers(0, len(data)))
    data[at:at] = draw(st.binary(max_size=40))


def _repeat(draw: st.DrawFn, data: bytearray) -> None:
    start = draw(st.integers(0, len(data)))
    data[start:start] = data[start : start + draw(st.integers(1, 64))]


def _count(draw: st.DrawFn, data: bytearray) -> None:
    """Four bytes, of which some are the length fields, say another number."""
    if len(data) >= 4:
        at = draw(st.integers(0, len(data) - 4))
        (said,) = struct.unpack_from("<I", data, at)
        near = [(said + 1) % 2**32, (said - 1) % 2**32, said // 2]
        struct.pack_into("<I", data, at, draw(st.sampled_from([*near, *_COUNTS])))


def _splice(draw: st.DrawFn, data: bytearray, other: bytes) -> None:
    data[draw(st.integers(0, len(data))) :] = other[draw(st.integers(0, len(other))) :]


_EDITS: list[Callable[[st.DrawFn, bytearray], None]] = [
    _flip,
    _truncate,
    _cut,
    _insert,
    _repeat,
    _count,
]


@st.composite
def _mutants(draw: st.DrawFn, name: str) -> tuple[bytes, int]:
    """A chunk that was valid until somebody changed it, and the number of its elements."""
    codec, values = get_codec(name), draw(chunks(most=4097))
    data = bytearray(codec.encode(values))
    if draw(st.booleans()):
        other = values_of(draw(st.sampled_from(list(KINDS))), draw(st.integers(0, 5000)))
        _splice(draw, data, bytes(codec.encode(other)))
    for edit in draw(st.lists(st.sampled_from(_EDITS), max_size=4)):
        edit(draw, data)
    return bytes(data), draw(st.one_of(st.just(len(values)), st.integers(0, 10_000)))


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=100)
@given(data=st.data())
def test_decoder_survives_changes_to_valid_chunks(name: str, data: st.DataObject) -> None:
    mutant, numel = data.draw(_mutants(name))
    decode_anything(get_codec(name), mutant, numel)


@pytest.mark.parametrize("name", CODECS)
def test_decoder_survives_every_flipped_bit_and_every_length(name: str) -> None:
    codec = get_codec(name)
    data = bytes(codec.encode(values_of("heavy", 300)))
    for bit in range(0, 8 * len(data), 1 if name == "sparse" else 13):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        decode_anything(codec, bytes(flipped), 300)
    for length in range(0, len(data), 1 if name == "sparse" else 13):
        assert decode_anything(codec, data[:length], 300) is None


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("change", [-1, 1])
def test_decoder_refuses_another_length(name: str, change: int) -> None:
    codec = get_codec(name)
    data = bytes(codec.encode(values_of("gaussian", 1000)))
    data = data[:-1] if change < 0 else data + b"\0"
    with pytest.raises(CorruptContributionError):
        codec.decode(data, 1000)


# -- the fields of a sparse chunk ------------------------------------------------------------------

#: Where they are in a chunk of one block.
_COUNT, _DIVISOR, _LAST = 9, 13, 17


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (_COUNT, 0),
        (_COUNT, 15),
        (_COUNT, 17),
        (_COUNT, 2**32 - 1),
        (_DIVISOR, 0),
        (_DIVISOR, 65536),
        (_DIVISOR, 2**32 - 1),
        (_LAST, 0),
        (_LAST, 2**32 - 1),
    ],
)
def test_sparse_decoder_refuses_impossible_fields(at: int, value: int) -> None:
    codec = get_codec("sparse")
    data = bytearray(codec.encode(values_of("gaussian", 1000)))
    assert struct.unpack_from("<I", data, _COUNT) == (16,)
    struct.pack_into("<I", data, at, value)
    assert decode_anything(codec, bytes(data), 1000) is None


def test_sparse_decoder_refuses_an_element_beyond_the_last() -> None:
    codec = get_codec("sparse", keep=1)
    values = torch.zeros(1000)
    values[999] = 1.0
    data = codec.encode(values)
    assert codec.decode(data, 1000)[999] == 1.0
    with pytest.raises(CorruptContributionError, match="not there"):
        codec.decode(data, 999)


@pytest.mark.parametrize("name", CODECS)
def test_decoder_allocates_no_more_than_its_elements_need(name: str) -> None:
    codec, numel = get_codec(name), 10_000
    valid = bytes(codec.encode(values_of("gaussian", numel)))
    hostile = [b"\xff" * codec.longest(numel), b"\xff" * 2**20, bytes(2**20), valid]
    for field in range(min(len(valid) - 4, 64)):
        hostile.append(valid[:field] + b"\xff\xff\xff\x7f" + valid[field + 4 :])
    for data in hostile:
        decode_anything(codec, data, numel)
