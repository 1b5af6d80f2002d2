"""The losses' formulas written out in fp64 with autograd, and ways to compare with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from diloco_cloud.composer.losses import fused, rowwise

torch.set_num_threads(1)


@dataclass(frozen=True)
class Case:
    """Random logits and a mask, rebuilt from a seed so that a failure prints short."""

    seed: int
    batch: int
    length: int
    vocabulary: int
    spread: float
    block: int

    @property
    def student(self) -> Tensor:
        return self._logits(self.seed)

    @property
    def teacher(self) -> Tensor:
        return self._logits(self.seed + 1)

    @property
    def mask(self) -> Tensor:
        """(B, T) of 0 and 1; some rows, now and then all, mark nothing."""
        made = torch.Generator().manual_seed(self.seed + 2)
        mask = torch.rand(self.batch, self.length, generator=made) < 0.6
        return (mask & (torch.rand(self.batch, 1, generator=made) < 0.8)).long()

    def _logits(self, seed: int) -> Tensor:
        made = torch.Generator().manual_seed(seed)
        shape = (self.batch, self.length, self.vocabulary)
        return torch.randn(shape, generator=made) * self.spread


cases = st.builds(
    Case,
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 3),
    length=st.integers(1, 5),
    vocabulary=st.integers(1, 9),
    spread=st.sampled_from([0.01, 1.0, 4.0]),
    block=st.sampled_from([1, 7, 20, 1 << 20]),
)
temperatures = st.sampled_from([0.5, 1.0, 2.0])
betas = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])


@contextmanager
def blocks_of(elements: int) -> Iterator[None]:
    """Cut the work into blocks this small, so that small cases have several."""
    before = rowwise.CPU_BLOCK, fused.TILE
    rowwise.CPU_BLOCK, fused.TILE = elements, 2 * elements
    try:
        yield
    finally:
        rowwise.CPU_BLOCK, fused.TILE = before


def assert_agree(
    ours: Callable[[Tensor], Tensor],
    reference: Callable[[Tensor], Tensor],
    student: Tensor,
    *,
    tolerance: float = 1e-5,
) -> None:
    """Values and gradients: ours in fp32 against the reference in fp64, also per token."""
    mine = student.clone().requires_grad_(True)
    theirs = student.double().requires_grad_(True)
    value, expected = ours(mine), reference(theirs)
    torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=tolerance)
    # Weights of its own for each token, so that none hides in a sum.
    weights = torch.linspace(0.5, 1.5, max(value.numel(), 1))[: value.numel()].view(value.shape)
    (gradient,) = torch.autograd.grad(value, mine, weights.to(value.dtype))
    (wanted,) = torch.autograd.grad(expected, theirs, weights.double(), allow_unused=True)
    wanted = torch.zeros_like(theirs) if wanted is None else wanted
    torch.testing.assert_close(gradient.double(), wanted, rtol=tolerance, atol=tolerance)


def jsd(
    student: Tensor,
    teacher: Tensor,
    beta: float,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Tensor:
    """(B, T): Agarwal et al., Eq. 1."""
    teacher = teacher.double()
    if top_k is not None:
        where = teacher.topk(min(top_k, teacher.size(-1)), dim=-1).indices
        student, teacher = student.gather(-1, where), teacher.gather(-1, where)
    return jsd_of((student / temperature).softmax(-1), (teacher / temperature).softmax(-1), beta)


def jsd_of(p: Tensor, q: Tensor, beta: float) -> Tensor:
    if beta in (0.0, 1.0):
        p, q = (p, q) if beta == 1.0 else (q, p)
        return (p * (p.log() - q.log())).sum(-1)
    m = beta * q + (1 - beta) * p
    return beta * jsd_of(q, m, 1.0) + (1 - beta) * jsd_of(p, m, 1.0)


def entropy(q: Tensor) -> Tensor:
    return -(q * q.log()).sum(-1)


def soft_entropy_opd(
    student: Tensor, teacher: Tensor, h_max: float | None, temperature: float
) -> Tensor:
    p, q = (student / temperature).softmax(-1), (teacher.double() / temperature).softmax(-1)
    ceiling = math.log(q.size(-1)) if h_max is None else h_max
    w = (entropy(q) / ceiling).clamp(0, 1)
    return w * jsd_of(p, q, 0.0) + (1 - w) * jsd_of(p, q, 1.0)


def paper_entropy_opd(
    student: Tensor,
    teacher: Tensor,
    temperature: float,
    *,
    threshold: float = 0.8,
    alpha: float = 1.0,
    top_k: int = 16,
) -> Tensor:
    p, q = (student / temperature).softmax(-1), (teacher.double() / temperature).softmax(-1)
    where = q.topk(min(top_k, q.size(-1)), dim=-1).indices
    forward = (q * (q.log() - p.log())).gather(-1, where).sum(-1)
    return jsd_of(p, q, 1.0) + alpha * (entropy(q) > threshold) * forward


def taid(student: Tensor, teacher: Tensor, t: float) -> Tensor:
    target = ((1 - t) * student.detach() + t * teacher.double()).softmax(-1)
    return -(target * student.log_softmax(-1)).sum(-1)


def reduced(per_token: Tensor, mask: Tensor | None, reduction: str) -> Tensor:
    """The reductions as their docstring has them."""
    kept = per_token if mask is None else torch.where(mask != 0, per_token, 0.0)
    count = per_token.numel() if mask is None else int((mask != 0).sum())
    if reduction == "none":
        return kept
    if reduction == "sum":
        return kept.sum()
    if reduction == "batchmean" and mask is None:
        return kept.sum() / per_token.size(0)
    return kept.sum() / max(count, 1)
