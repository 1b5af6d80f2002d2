"""What holds of every codec, and of each on its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from codec_values import KINDS, LENGTHS, chunks, values_of
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cloud.errors import ConfigError
from diloco_cloud.exchange.codecs import get_codec

CODECS = ["fp32", "bf16", "int8", "e3m0", "e2m1", "sparse"]
DENSE = CODECS[:-1]

fuzzed = settings(max_examples=40)


def _decoded(name: str, values: torch.Tensor) -> torch.Tensor:
    codec = get_codec(name)
    return codec.decode(codec.encode(values), values.numel())


def _error(values: torch.Tensor, decoded: torch.Tensor) -> float:
    return float((values - decoded).norm() / values.norm())


# -- every codec -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
@fuzzed
@given(values=chunks())
def test_codec_decodes_finite_values_within_its_length(name: str, values: torch.Tensor) -> None:
    codec = get_codec(name)
    before = values.clone()
    data = codec.encode(values)
    decoded = codec.decode(data, len(values))
    assert torch.equal(values, before)
    assert len(data) <= codec.longest(len(values))
    assert (decoded.shape, decoded.dtype) == (values.shape, torch.float32)
    if name != "bf16":  # whose largest number is smaller than fp32's
        assert decoded.isfinite().all()


@pytest.mark.parametrize("name", CODECS)
@fuzzed
@given(values=chunks())
def test_codec_never_makes_an_error_larger_than_the_value_and_its_step(
    name: str, values: torch.Tensor
) -> None:
    values = values.clamp(-(2.0**127), 2.0**127)
    errors = (values - _decoded(name, values)).abs()
    blocks = torch.nn.functional.pad(values, (0, -len(values) % 128)).view(-1, 128)
    largest = blocks.abs().amax(1).repeat_interleave(128)[: len(values)]
    # A bf16 scale is at most 1/128 above what the block needs.
    bound = {
        "fp32": torch.zeros(()),
        "bf16": values.abs() * 2**-8,
        "int8": largest * (0.5 / 127 * 1.008),
        # A third or a fifth of the value, or half a step, and the gain of what it is rounded to.
        "e3m0": torch.maximum(values.abs() * 0.381, largest * (0.536 / 64 * 1.008)),
        "e2m1": torch.maximum(values.abs() * 0.215, largest * (0.27 / 6 * 1.008)),
        "sparse": values.abs(),
    }[name]
    assert (errors <= bound + 2.0**-100).all()


@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("name", CODECS)
def test_codec_leaves_zeros_zero(name: str, numel: int) -> None:
    assert not _decoded(name, torch.zeros(numel)).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", CODECS)
def test_codec_shows_what_is_not_finite(name: str, bad: float) -> None:
    for place in (0, 5000):
        values = values_of("gaussian", 5001)
        values[place] = bad
        assert not _decoded(name, values)[place].isfinite()


@pytest.mark.parametrize("name", CODECS)
def test_codec_shows_every_nan(name: str) -> None:
    nans = torch.tensor([0x7FFF_FFFF, -1, 0x7F80_0001, 0x7FC0_0000], dtype=torch.int32)
    for nan in nans.view(torch.float32):
        assert _decoded(name, nan).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CODECS)
def test_codec_reads_other_dtypes_as_fp32(name: str, dtype: torch.dtype) -> None:
    values = values_of("gaussian", 4100).to(dtype)
    codec = get_codec(name)
    assert codec.encode(values) == codec.encode(values.float())


@pytest.mark.parametrize("name", CODECS)
def test_codec_reads_any_stride_in_order(name: str) -> None:
    square = values_of("heavy", 72 * 72).view(72, 72)
    codec = get_codec(name)
    for view in (square.T, square[::2, 1:], square[:1].expand(9, 72), square[3:3]):
        assert codec.encode(view) == codec.encode(view.reshape(-1).clone())


@pytest.mark.parametrize("name", CODECS)
def test_codec_decodes_from_unaligned_and_read_only_memory(name: str) -> None:
    codec, values = get_codec(name), values_of("heavy", 5000)
    data = codec.encode(values)
    moved = memoryview(b"x" + bytes(data))[1:]
    expected = codec.decode(data, 5000)
    assert torch.equal(codec.decode(moved, 5000), expected)
    assert torch.equal(codec.decode(np.frombuffer(moved, np.uint8), 5000), expected)


@pytest.mark.parametrize("name", CODECS)
def test_codec_says_how_many_bits_it_takes(name: str) -> None:
    codec = get_codec(name)
    bits = 8 * len(codec.encode(values_of("gaussian", 2**20))) / 2**20
    assert bits == pytest.approx(codec.bits_per_parameter, rel=0.005)


@pytest.mark.parametrize(
    ("name", "gaussian", "heavy"),
    [
        ("bf16", 0.0017, 0.0017),
        ("int8", 0.0065, 0.014),
        ("e3m0", 0.196, 0.170),
        ("e2m1", 0.109, 0.150),
        ("sparse", 0.938, 0.805),
    ],
)
def test_codec_error_is_as_measured(name: str, gaussian: float, heavy: float) -> None:
    for kind, expected in (("gaussian", gaussian), ("heavy", heavy)):
        values = values_of(kind, 2**18)
        assert _error(values, _decoded(name, values)) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", DENSE)
def test_dense_codec_does_not_shrink_what_it_encodes(name: str) -> None:
    """Every replica shrinks alike, so that a mean has it whole: a smaller outer step."""
    values = values_of("gaussian", 2**18)
    share = _decoded(name, values).double() @ values.double() / values.double().square().sum()
    assert float(share) == pytest.approx(1, abs=0.003)


@pytest.mark.parametrize("name", CODECS)
@fuzzed
@given(values=chunks())
def test_codec_subtracts_what_it_decodes(name: str, values: torch.Tensor) -> None:
    codec = get_codec(name)
    data, minuend = codec.encode(values), values_of("spread", len(values))
    expected = minuend - codec.decode(data, len(values))
    codec.subtract(data, minuend)
    assert torch.equal(minuend, expected)


@pytest.mark.parametrize("name", CODECS)
@fuzzed
@given(values=chunks(), bad=st.sampled_from([0.0, math.nan, math.inf]))
def test_codec_knows_without_decoding_whether_all_is_finite(
    name: str, values: torch.Tensor, bad: float
) -> None:
    values[: len(values) // 3] += bad
    codec = get_codec(name)
    data = codec.encode(values)
    expected = bool(codec.decode(data, len(values)).isfinite().all())
    assert codec.all_finite(data, len(values)) == expected


# -- means -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
def test_mean_is_the_weighted_mean_of_what_was_decoded(name: str) -> None:
    codec = get_codec(name)
    data = [codec.encode(values_of("gaussian", 9001, seed)) for seed in range(5)]
    weights = [1.0, 0.25, 0.6, 1.0, 0.1]
    mean = codec.mean(9001)
    for chunk, weight in zip(data, weights, strict=True):
        mean.add(chunk, weight)
    decoded = torch.stack([codec.decode(chunk, 9001) for chunk in data]).double()
    weight_of = torch.tensor(weights)[:, None].double().expand_as(decoded)
    if name == "sparse":
        weight_of = weight_of * (decoded != 0)
    expected = (decoded * weight_of).sum(0) / weight_of.sum(0).clamp(min=1e-9)
    torch.testing.assert_close(mean.result().double(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", CODECS)
def test_mean_of_nothing_is_zero(name: str) -> None:
    assert get_codec(name).mean(3).result().tolist() == [0, 0, 0]


def test_dense_mean_adds_each_rounded_product_in_order() -> None:
    codec = get_codec("fp32")
    values = [values_of("gaussian", 500, seed) for seed in range(3)]
    mean, sums = codec.mean(500), torch.zeros(500)
    for one, weight in zip(values, (1.0, 0.3, 0.7), strict=True):
        mean.add(codec.encode(one), weight)
        sums = sums + one * weight
    assert torch.equal(mean.result(), sums / 2.0)


def test_sparse_mean_is_over_the_senders_of_each_element() -> None:
    codec = get_codec("sparse")
    mean = codec.mean(3)
    mean.add(codec.encode(torch.tensor([4.0, 0.0, 0.0])), 1.0)
    mean.add(codec.encode(torch.tensor([0.0, 8.0, 0.0])), 1.0)
    mean.add(codec.encode(torch.tensor([0.0, 2.0, 0.0])), 0.5)
    assert mean.result().tolist() == [4.0, 6.0, 0.0]


# -- sparse ----------------------------------------------------------------------------------------


def test_sparse_takes_no_more_than_015_bits_per_parameter() -> None:
    codec = get_codec("sparse")
    for kind in ("gaussian", "heavy"):
        values = values_of(kind, 2**20)
        assert 8 * len(codec.encode(values)) <= 0.15 * 2**20


@fuzzed
@given(values=chunks())
def test_sparse_never_adds_to_what_remains(values: torch.Tensor) -> None:
    decoded = _decoded("sparse", values)
    assert ((values - decoded).abs() <= values.abs()).all()
    sent = torch.nn.functional.pad(decoded != 0, (0, -len(values) % 4096)).view(-1, 4096)
    assert (sent.sum(1) <= 64).all()


def test_sparse_sends_the_largest_of_every_block() -> None:
    values = values_of("gaussian", 8192)
    values[4096:] *= 1e-6
    sent = (_decoded("sparse", values) != 0).view(2, 4096)
    for block, chosen in zip(values.view(2, 4096).abs(), sent, strict=True):
        assert chosen.sum() == 64
        assert block[chosen].min() > block[~chosen].max()


def test_sparse_keeps_blocks_of_unlike_tensors_apart() -> None:
    """With one pair of magnitudes for the whole chunk, the small tensor would be blown up."""
    values = values_of("gaussian", 8192)
    values[4096:] *= 1e-4
    decoded = _decoded("sparse", values)
    for half in (slice(0, 4096), slice(4096, 8192)):
        kept = decoded[half] != 0
        assert _error(values[half][kept], decoded[half][kept]) < 0.1


def test_sparse_sends_less_where_there_is_less() -> None:
    values = torch.zeros(2**20)
    assert len(get_codec("sparse").encode(values)) < 300
    values[7] = -2.0
    assert _decoded("sparse", values)[7] == -2.0
    assert len(get_codec("sparse").encode(values)) < 310


@pytest.mark.parametrize("keep", [1, 3, 9, 16, 200, 1500, 4000, 4096])
def test_sparse_finds_its_places_at_any_density(keep: int) -> None:
    """Remainders of 0 to 12 bits, and divisors that are powers of two, and others."""
    values = values_of("gaussian", 20_001)
    decoded = get_codec("sparse", keep=keep).decode(
        get_codec("sparse", keep=keep).encode(values), len(values)
    )
    magnitudes = torch.nn.functional.pad(values.abs(), (0, -len(values) % 4096)).view(-1, 4096)
    least = magnitudes[:4].sort(1, descending=True).values[:, keep - 1]
    sent = (decoded != 0)[: 4 * 4096].view(4, 4096)
    assert (magnitudes[:4][sent] >= least.repeat_interleave(4096).view(4, 4096)[sent]).all()
    assert sent.sum() > 2 * keep
    assert (decoded.sign() * values.sign() >= 0).all()


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": 4097}, {"decay": 0.0}, {"decay": 1.5}])
def test_sparse_refuses_impossible_options(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        get_codec("sparse", **options)


def test_kinds_differ() -> None:
    assert len({values_of(kind, 5000).numpy().tobytes() for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("name", DENSE)
def test_dense_codec_has_one_length(name: str) -> None:
    """So that a reader knows where the chunks of a dense codec are."""
    codec = get_codec(name)
    for kind in KINDS:
        assert len(codec.encode(values_of(kind, 1001))) == codec.longest(1001)
