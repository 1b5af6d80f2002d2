"""Radial-directional averaging: what it computes, and that everybody computes the same bits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from processors import output_on

from diloco_cloud.exchange import merging
from diloco_cloud.exchange.layout import DTYPES
from diloco_cloud.exchange.weighting import PLAIN, mean_norms

WIDE = sorted({torch.float32, torch.float64}, key=str)


def _linear(contributions: list[list[torch.Tensor]], weights: list[float]) -> list[torch.Tensor]:
    """The weighted mean that the exchange computes, tensor by tensor."""
    total = math.fsum(weights)
    return [
        sum(t * (w / total) for t, w in zip(column, weights, strict=True)).to(column[0].dtype)
        for column in zip(*contributions, strict=True)
    ]


def _rda(
    contributions: list[list[torch.Tensor]], weights: list[float], plain: list[bool] | None = None
) -> list[torch.Tensor]:
    """A round as replicas and commit go through it."""
    flags = plain or [False] * len(contributions[0])
    pairs = [merging.directions(tensors, flags) for tensors in contributions]
    mean = _linear([tensors for tensors, _ in pairs], weights)
    merging.rescale(mean, mean_norms([norms for _, norms in pairs], weights))
    return mean


def _by_the_formula(vectors: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """The definition, in fp64, written as the paper has it."""

    def phi(x: torch.Tensor) -> torch.Tensor:
        return x / x.norm() if x.norm() > 0 else x

    wide = [v.double() for v in vectors]
    total = sum(weights)
    length = sum(w * v.norm() for w, v in zip(weights, wide, strict=True)) / total
    return length * phi(sum(w * phi(v) for w, v in zip(weights, wide, strict=True)) / total)


def _orthogonal(count: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(size, count, generator=generator))
    return [column.contiguous() * (1 + rank) for rank, column in enumerate(basis.T)]


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.25, 1.0, 0.5]])
def test_merge_is_the_papers_formula(weights: list[float]) -> None:
    torch.manual_seed(0)
    shapes = [(3, 5), (70_000,), ()]
    contributions = [[torch.randn(s) * 10**rank for s in shapes] for rank in range(3)]
    merged = _rda(contributions, weights)
    for index, tensor in enumerate(merged):
        expected = _by_the_formula([c[index] for c in contributions], weights)
        assert tensor.shape == contributions[0][index].shape
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DTYPES)
def test_merge_of_equal_replicas_is_their_own_pseudo_gradient(name: str) -> None:
    torch.manual_seed(0)
    own = [(torch.randn(40_000) * 1e-3).to(DTYPES[name]), torch.randn(4, 4).to(DTYPES[name])]
    merged = _rda([own] * 4, [1.0, 0.5, 0.25, 1.0])
    for mine, theirs in zip(own, merged, strict=True):
        assert theirs.dtype == mine.dtype
        # fp16 holds a thousandth only as a subnormal, to 6e-8.
        torch.testing.assert_close(theirs, mine, rtol=8 * torch.finfo(mine.dtype).eps, atol=1e-7)


def test_mean_of_orthogonal_replicas_shrinks_and_the_merge_does_not() -> None:
    for count in (2, 4, 8, 16):
        vectors = [[v / v.norm()] for v in _orthogonal(count, 1000)]
        (mean,), (merged,) = _linear(vectors, [1.0] * count), _rda(vectors, [1.0] * count)
        assert merging.norm(mean) == pytest.approx(count**-0.5, rel=1e-4)
        assert merging.norm(merged) == pytest.approx(1, rel=1e-6)
        torch.testing.assert_close(mean / mean.norm(), merged, rtol=1e-4, atol=1e-6)


def test_a_long_contribution_does_not_turn_the_direction() -> None:
    short, long = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1000.0])
    (merged,) = _rda([[short], [long]], [1.0, 1.0])
    torch.testing.assert_close(merged, torch.full((2,), 500.5 / math.sqrt(2)))


def test_order_of_replicas_that_weigh_the_same_does_not_matter() -> None:
    torch.manual_seed(0)
    contributions = [[torch.randn(1000)] for _ in range(4)]
    merges = [_rda(list(order), [1.0] * 4)[0] for order in itertools.permutations(contributions)]
    for merged in merges[1:]:
        torch.testing.assert_close(merged, merges[0], rtol=1e-5, atol=1e-6)


def test_embeddings_are_averaged_as_they_are() -> None:
    contributions = [[torch.tensor([1.0, 3.0]), torch.tensor([1.0, 0.0])] for _ in range(2)]
    contributions[1][0], contributions[1][1] = torch.tensor([3.0, 1.0]), torch.tensor([0.0, 1.0])
    (_, norms), *_ = (merging.directions(c, [True, False]) for c in contributions)
    assert norms == (PLAIN, 1.0)
    embedding, matrix = _rda(contributions, [1.0, 1.0], [True, False])
    assert torch.equal(embedding, torch.tensor([2.0, 2.0]))
    torch.testing.assert_close(matrix, torch.full((2,), 2**-0.5))


def test_directions_leave_their_input_and_have_a_root_mean_square_of_1() -> None:
    torch.manual_seed(0)
    given = [torch.randn(100, 7).T, torch.randn(70_000) * 1e-12]
    kept = [tensor.clone() for tensor in given]
    found, norms = merging.directions(given, [False, False])
    for before, tensor, direction, length in zip(kept, given, found, norms, strict=True):
        assert torch.equal(tensor, before)
        assert length == pytest.approx(float(before.double().norm()), rel=1e-12)
        assert float(direction.square().mean()) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("float16", 6e4),  # its square is beyond fp16
        ("float16", 6e-8),  # the least there is
        ("bfloat16", 3e38),
        ("bfloat16", 1e-40),
        ("float32", 3e38),  # so is the square here
        ("float32", 1e-45),
        ("float64", 1e308),
        ("float64", 5e-324),
    ],
)
def test_no_magnitude_is_too_large_or_too_small(name: str, value: float) -> None:
    tensor = torch.full((9,), value, dtype=torch.float64).to(DTYPES[name])
    assert bool((tensor != 0).all())
    exact = float(tensor[0])
    # Nine times 1e308 squared is 3e308 in length: as far as fp64 goes, and no norm of one.
    if exact < 1e308:
        assert merging.norm(tensor) == pytest.approx(3 * exact, rel=1e-9)
        (merged,) = _rda([[tensor], [tensor]], [1.0, 1.0])
        torch.testing.assert_close(merged, tensor, rtol=4 * torch.finfo(tensor.dtype).eps, atol=0)


def test_a_norm_that_no_float_holds_counts_as_not_finite() -> None:
    tensor = torch.full((9,), 1e308, dtype=torch.float64)
    assert merging.norm(tensor) == math.inf
    (same,), norms = merging.directions([tensor], [False])
    assert norms == (0.0,)
    assert same is tensor


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", WIDE)
def test_what_is_not_finite_stays_visible(bad: float, dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, bad, 2.0], dtype=dtype)
    assert not math.isfinite(merging.norm(tensor))
    (same,), norms = merging.directions([tensor], [False])
    assert norms == (0.0,)
    assert same is tensor


def test_zero_tensors_have_no_direction_and_count_in_the_length() -> None:
    contributions = [[torch.zeros(3)], [torch.tensor([0.0, 4.0, 0.0])]]
    (merged,) = _rda(contributions, [1.0, 1.0])
    torch.testing.assert_close(merged, torch.tensor([0.0, 2.0, 0.0]))
    (nothing,) = _rda([[torch.zeros(3)]] * 2, [1.0, 1.0])
    assert torch.equal(nothing, torch.zeros(3))


def test_directions_that_cancel_become_zero_and_not_rounding_made_large() -> None:
    torch.manual_seed(0)
    v = torch.randn(5000)
    (merged,) = _rda([[v], [-v * 3]], [1.0, 1.0])
    assert torch.equal(merged, torch.zeros(5000))


def test_tensors_without_elements_pass() -> None:
    (merged,) = _rda([[torch.zeros(0, 4)]] * 2, [1.0, 1.0])
    assert merged.shape == (0, 4)


def test_rescale_refuses_what_it_cannot_do_in_place() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        merging.rescale([torch.ones(2, 3).T], [1.0])
    with pytest.raises(ValueError, match=r"shorter|longer"):
        merging.rescale([torch.ones(2)], [1.0, 1.0])


@pytest.mark.parametrize("size", [1, 2, 3, 127, 2**15, 2**15 + 1, 100_003])
def test_norm_is_exact_to_the_last_places(size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    exact = math.sqrt(math.fsum(x * x for x in values.double().tolist()))
    assert merging.norm(values) == pytest.approx(exact, rel=1e-14)


RESCALED = """
import sys, numpy, torch
from diloco_cloud.exchange import merging
from diloco_cloud.exchange.layout import DTYPES, digest_tensors
torch.set_num_threads(int(sys.argv[1]))
draw = numpy.random.default_rng(0)
values = torch.from_numpy(draw.standard_normal(300_007, "f")) * 1e-3
tensors = [t.to(dtype) for dtype in DTYPES.values() for t in (values, values[:77], values[0])]
norms = [merging.norm(tensor) for tensor in tensors]
merging.rescale(tensors, [0.7 * norm for norm in norms])
print(digest_tensors(tensors), norms)
"""


def test_bits_do_not_depend_on_cpu_or_threads() -> None:
    here = torch.backends.cpu.get_cpu_capability().lower()
    places = itertools.product({here, "avx2", "default"}, ("1", "2"))
    assert len({output_on(capability, RESCALED, threads) for capability, threads in places}) == 1
