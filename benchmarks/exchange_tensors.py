"""What the replicas of a measurement exchange: a model's tensors, and their mean, found slowly.

Values are Gaussian, differ by replica and round, and can be had again by anybody: a replica's
contribution is a window of its own noise, repeated. The noise's length is prime, so that a piece
that lands in a wrong place has wrong values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

import torch
import xxhash

#: Values of a replica's noise: a prime.
_NOISE = 1_000_003
#: How far the window moves from round to round.
_STEP = 7_919
_SCALE = 0.01
#: Of a decoder layer, in widths squared: query, key and value, output, up, gate, down.
_MATRICES = (1.0, 0.25, 0.25, 1.0, 2.75, 2.75, 2.75)


def model_shape(nbytes: int, layers: int = 11) -> list[int]:
    """Elements of each fp32 tensor of a decoder-only model of ``nbytes``.

    Nine tensors a layer, two of them as small as norms are, an embedding of a fifth of the whole,
    and a last norm.
    """
    total = nbytes // 4
    embedding = total // 5
    width = int(((total - embedding) / layers / sum(_MATRICES)) ** 0.5)
    layer = [width, *(int(width * width * part) for part in _MATRICES), width]
    sizes = [embedding, *(layer * layers), width]
    sizes[0] += total - sum(sizes)
    return sizes


@lru_cache(maxsize=16)
def _noise(rank: int) -> torch.Tensor:
    return torch.randn(_NOISE, generator=torch.Generator().manual_seed(rank)) * _SCALE


def fill(tensors: Sequence[torch.Tensor], rank: int, round_: int) -> None:
    """Overwrite ``tensors`` with a replica's contribution to a round."""
    starts = accumulate((t.numel() for t in tensors), initial=0)
    for tensor, start in zip(tensors, starts, strict=False):
        _fill(tensor, rank, start + round_ * _STEP)


def _fill(tensor: torch.Tensor, rank: int, start: int) -> None:
    noise, at = _noise(rank), 0
    while at < tensor.numel():
        low = (start + at) % _NOISE
        count = min(_NOISE - low, tensor.numel() - at)
        tensor[at : at + count] = noise[low : low + count]
        at += count


def empty(sizes: Sequence[int]) -> list[torch.Tensor]:
    """Tensors to be filled; each touched, so that they count as the model's memory."""
    return [torch.zeros(size) for size in sizes]


def slow_mean(sizes: Sequence[int], replicas: int, round_: int) -> Iterator[torch.Tensor]:
    """The mean of all contributions to a round, tensor by tensor: added by rank, then divided."""
    for size, start in zip(sizes, accumulate(sizes, initial=0), strict=False):
        total, one = torch.zeros(size), torch.empty(size)
        for rank in range(replicas):
            _fill(one, rank, start + round_ * _STEP)
            total += one
        yield total / replicas


def digest(tensors: Sequence[torch.Tensor] | Iterator[torch.Tensor]) -> str:
    """Of all bytes of all tensors."""
    state = xxhash.xxh3_128()
    for tensor in tensors:
        state.update(tensor.numpy())
    return state.hexdigest()


def relative_error(tensors: Sequence[torch.Tensor], replicas: int, round_: int) -> float:
    """L2 norm of what ``tensors`` lack of the true mean, relative to the mean's."""
    wrong = whole = 0.0
    sizes = [tensor.numel() for tensor in tensors]
    for found, mean in zip(tensors, slow_mean(sizes, replicas, round_), strict=True):
        whole += float(mean.double().square().sum())
        wrong += float(mean.sub_(found).double().square().sum())
    return (wrong / whole) ** 0.5
