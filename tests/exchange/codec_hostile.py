"""What must hold of any bytes that a decoder is given, for every way of making such bytes."""

from __future__ import annotations

import tracemalloc

import torch

from diloco_cloud.errors import CorruptContributionError
from diloco_cloud.exchange.codecs.base import Codec

#: Bytes that a decoder may allocate, at most: a few int64 for each element, and its tables.
PER_ELEMENT, ONCE = 64, 2**16


def decode_anything(codec: Codec, data: bytes, numel: int) -> torch.Tensor | None:
    """Decode bytes that anybody may have written; their values, or None where they are refused.

    Asserts what a round relies on: there is that one error, or values of the right shape; memory is
    bounded; who only asks whether they are finite is told the same; a mean takes the bytes or is as
    it was.
    """
    values = _decode_in_bounds(codec, data, numel)
    ones = codec.encode(torch.ones(numel))
    mean = codec.mean(numel)
    mean.add(ones, 1.0)
    try:
        mean.add(data, 0.5)
        accepted = True
    except CorruptContributionError:
        accepted = False
    assert accepted == (values is not None)
    assert _all_finite(codec, data, numel) == (None if values is None else _finite(values))
    result = mean.result()
    assert (result.shape, result.dtype) == ((numel,), torch.float32)
    if values is None:
        assert torch.equal(result, codec.decode(ones, numel))
        return None
    assert (values.shape, values.dtype) == ((numel,), torch.float32)
    assert values.is_contiguous()
    return values


def _all_finite(codec: Codec, data: bytes, numel: int) -> bool | None:
    try:
        return codec.all_finite(data, numel)
    except CorruptContributionError:
        return None


def _finite(values: torch.Tensor) -> bool:
    return bool(values.isfinite().all())


def _decode_in_bounds(codec: Codec, data: bytes, numel: int) -> torch.Tensor | None:
    tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        try:
            return codec.decode(data, numel)
        except CorruptContributionError:
            return None
        finally:
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before <= PER_ELEMENT * numel + ONCE
    finally:
        if not tracing:
            tracemalloc.stop()
