"""Every codec against the same in plain Python, bit for bit."""

from __future__ import annotations

import struct

import codec_references as reference
import pytest
import torch
from codec_values import KINDS, chunks, values_of
from hypothesis import given, settings

from diloco_cloud.exchange.codecs import get_codec

CODECS = list(reference.ENCODE)


def _bits(values: torch.Tensor) -> bytes:
    return values.numpy().tobytes()


def _check(name: str, values: torch.Tensor) -> None:
    codec = get_codec(name)
    data = bytes(codec.encode(values))
    assert data == reference.ENCODE[name](values.tolist())
    decoded = reference.DECODE[name](data, len(values))
    assert _bits(codec.decode(data, len(values))) == struct.pack(f"<{len(decoded)}f", *decoded)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CODECS)
def test_codec_equals_reference_on_every_kind_of_values(name: str, kind: str) -> None:
    for numel in (0, 1, 129, 4200):
        _check(name, values_of(kind, numel))


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=30)
@given(values=chunks(most=4097))
def test_codec_equals_reference(name: str, values: torch.Tensor) -> None:
    _check(name, values)


@pytest.mark.parametrize("numel", [4096, 5000])
@pytest.mark.parametrize("keep", [1, 7, 300, 2048, 4096])
def test_sparse_equals_reference_at_any_density(keep: int, numel: int) -> None:
    values = values_of("heavy", numel)
    data = get_codec("sparse", keep=keep).encode(values)
    assert bytes(data) == reference.sparse_encode(values.tolist(), keep)
    # What was kept only the encoder needs to know.
    decoded = get_codec("sparse").decode(data, numel)
    assert decoded.tolist() == reference.sparse_decode(bytes(data), numel)
