"""Radial-directional averaging: a mean of directions, as long as the contributions are on average.

Pseudo-gradients of replicas that train apart are almost orthogonal, so the plain mean of N of them
is about sqrt(N) times shorter than each, and the best outer learning rate depends on N. Decoupled
DiLoCo (arXiv:2604.21428) averages lengths and directions on their own, tensor by tensor, except for
embeddings, whose rows are trained on as often as their tokens occur:

    RDA(v) = sum(w |v|) / sum(w) * phi(sum(w phi(v)) / sum(w)),    phi(x) = x / |x|, phi(0) = 0

What goes through the store is a linear mean all the same. Each replica contributes
:func:`directions`; its header says how long they were; the commit says how long the result is to be
(:func:`~diloco_cloud.exchange.weighting.mean_norms`); everybody makes the mean that long
(:func:`rescale`), and everybody gets the same bits.

A direction is scaled to a root mean square of 1, not to a length of 1: a unit vector of many
elements is too fine for fp16. The factor is the same for all and goes out again with the length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from diloco_cloud.exchange.weighting import PLAIN

#: Elements at a time: their fp64 copies stay in the processor's cache.
_BLOCK: Final = 2**15
#: Directions whose mean is so short cancel each other; what is left is rounding.
_CANCELLED: Final = 1e-6


def norm(tensor: torch.Tensor) -> float:
    """L2 norm, the same bits on every machine; NaN or infinite where an element is.

    ``torch.linalg.vector_norm``, and any reduction, adds in an order that depends on the kind of
    CPU and on the number of threads. Here every addition is elementwise, and so in an order written
    down here: one of :data:`_BLOCK` sums per place in a block, then the sums in halves. In fp64,
    whose range holds the squares of all narrower types.
    """
    flat = tensor.detach().reshape(-1)
    if tensor.dtype != torch.float64:
        return math.sqrt(_sum_of_squares(flat, 1.0))
    largest = float(flat.abs().max()) if len(flat) else 0.0
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * math.sqrt(_sum_of_squares(flat, largest))


def directions(
    tensors: Sequence[torch.Tensor], averaged_plainly: Sequence[bool]
) -> tuple[list[torch.Tensor], tuple[float, ...]]:
    """What to contribute for ``tensors``, and the norms to say with it.

    Args:
        tensors: any floating point; left as they are.
        averaged_plainly: for each, whether it is an embedding or else to be averaged as it is.

    Returns:
        New tensors of the same dtypes with a root mean square of 1, or 0 where all elements are;
        and their norms. Tensors averaged as they are, are returned themselves, with
        :data:`~diloco_cloud.exchange.weighting.PLAIN` for a norm. The norm of a tensor that has
        NaN or infinite elements is 0, and the tensor is returned itself: it is of no use, and the
        contribution says so elsewhere.
    """
    found, norms = [], []
    for tensor, is_plain in zip(tensors, averaged_plainly, strict=True):
        length = PLAIN if is_plain else norm(tensor)
        if length > 0 and math.isfinite(length):
            tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
            _multiply(tensor, math.sqrt(tensor.numel()), length)
        norms.append(length if math.isfinite(length) else 0.0)
        found.append(tensor)
    return found, tuple(norms)


def rescale(mean: Sequence[torch.Tensor], norms: Sequence[float]) -> None:
    """Make each tensor of a mean of directions as long as ``norms`` says; in place, bit for bit.

    A tensor whose directions cancel becomes zero.

    Args:
        mean: contiguous tensors of :func:`directions`, averaged.
        norms: of the merged update, from
            :func:`~diloco_cloud.exchange.weighting.mean_norms`.

    Raises:
        ValueError: a tensor is not contiguous, or there is another number of norms.
    """
    for tensor, length in zip(mean, norms, strict=True):
        if length == PLAIN:
            continue
        found = norm(tensor)
        if length == 0 or found <= _CANCELLED * math.sqrt(tensor.numel()):
            tensor.zero_()
        else:
            _multiply(tensor, length, found)


def _sum_of_squares(flat: torch.Tensor, unit: float) -> float:
    """Sum of ``(x / unit)**2`` in fp64, in an order that only the length decides."""
    # A power of two, to be halved; no larger than the tensor needs.
    lanes = min(_BLOCK, 1 << max(len(flat) - 1, 0).bit_length())
    sums = flat.new_zeros(lanes, dtype=torch.float64)
    for block in _blocks(flat, lanes):
        squares = block.to(torch.float64, copy=True)
        if unit != 1:
            squares.div_(unit)
        sums[: len(squares)].add_(squares.mul_(squares))
    while lanes > 1:
        lanes //= 2
        sums = sums[:lanes] + sums[lanes:]
    return float(sums)


def _multiply(tensor: torch.Tensor, by: float, over: float) -> None:
    """``tensor *= by / over`` in place, in fp64 and rounded once, whatever the magnitudes."""
    if not tensor.is_contiguous():
        raise ValueError("only contiguous tensors can be rescaled in place")
    factor = by / over if over else 0.0
    split = not 1e-300 < abs(factor) < 1e300
    for block in _blocks(tensor.detach().view(-1), _BLOCK):
        wide = block.to(torch.float64)
        # Where fp64 cannot hold the factor, the steps to it can still be taken one by one.
        wide = wide / over * by if split else wide * factor
        if block.dtype not in (torch.float32, torch.float64):
            wide = wide.to(torch.float32)
        block.copy_(wide)


def _blocks(flat: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    return (flat[start : start + size] for start in range(0, len(flat), size))
