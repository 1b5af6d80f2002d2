"""Divergences of one token's two distributions, in closed form: the value and its derivative.

A kernel gets a block of C tokens as log-probabilities a (student) and b (teacher), both (C, V)
with p = exp(a) and q = exp(b), and returns one value per token, in nats, and a function for the
*slope* s_v = dL/da_v with its sum over v. The derivative in the student's logits is then
``s - p·Σs`` (:mod:`rowwise` applies it). Closed forms instead of autograd make one pass over the
block where autograd keeps every intermediate, and they stay free of NaN where a logit is -inf.

Conventions at the edges, the same for all: 0·log 0 = 0; a divergence that is infinite, such as
KL(p‖q) where q vanishes and p does not, is ``inf`` and not a large number.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from diloco_cloud.composer.losses.checks import positive, require, unit_interval

#: The slope (C, V), which the caller may overwrite, and its sum over the vocabulary: (C, 1) or
#: one number for all tokens.
Slope = tuple[Tensor, Tensor | float]
#: ``kernel(a, b, p)``: values (C,), and the slope on request. ``a`` and ``b`` are scratch.
Kernel = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Callable[[], Slope]]]


def generalized_jsd(beta: float) -> Kernel:
    """β·KL(q‖m) + (1-β)·KL(p‖m), m = β·q + (1-β)·p; KL(q‖p) at β = 0 and KL(p‖q) at β = 1.

    Agarwal et al., *On-Policy Distillation of Language Models*, arXiv:2306.13649, Eq. 1, with
    the two limits that GKD gives the ends (the formula itself vanishes there).
    """
    unit_interval(beta, "beta")
    if beta == 0.0:
        return forward_kl
    if beta == 1.0:
        return reverse_kl

    def kernel(a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, Callable[[], Slope]]:
        q = b.exp()
        # A floor and not an exact log(m): where m underflows, so do both weights.
        log_m = torch.lerp(p, q, beta).clamp_min_(torch.finfo(p.dtype).tiny).log_()
        student, a_gap = _expectation(p, a.sub_(log_m))
        teacher, _ = _expectation(q, b.sub_(log_m))
        slope_sum = (1.0 - beta) * student

        def slope() -> Slope:
            return a_gap.mul_(p).mul_(1.0 - beta), slope_sum.unsqueeze(-1)

        return slope_sum + beta * teacher, slope

    return kernel


def forward_kl(a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, Callable[[], Slope]]:
    """KL(q‖p) = Σ q·(b - a): the student must cover what the teacher does."""
    q = b.exp()
    value, _ = _expectation(q, b - a)
    return value, lambda: (q.neg_(), -1.0)


def reverse_kl(a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, Callable[[], Slope]]:
    """KL(p‖q) = Σ p·(a - b): the student must keep to what the teacher does."""
    value, gap = _expectation(p, a - b)
    return value, lambda: (gap.add_(1.0).mul_(p), (value + 1.0).unsqueeze(-1))


def taid(t: float) -> Kernel:
    """-Σ r·a with r = softmax((1-t)·sg(student) + t·teacher), a cross-entropy.

    Shing et al., *TAID*, arXiv:2501.16937, Eq. 3-5, as the authors' code computes it: the
    target's entropy is not subtracted, and a token that the student cannot produce (its logit is
    -inf) adds nothing. ``t = 0`` gives a gradient of exactly zero, ``t = 1`` that of KL(q‖p).
    """
    unit_interval(t, "t")

    def kernel(a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, Callable[[], Slope]]:
        target = _taid_target(a, b, p, t)
        value = -_dot(target, a)
        target_sum: Tensor | float = -1.0
        if not bool(value.isfinite().all()):
            impossible = a == -math.inf
            target = target.masked_fill(impossible, 0.0)
            value = -_dot(target, a.masked_fill_(impossible, 0.0))
            target_sum = -target.sum(-1, keepdim=True)
        return value, lambda: (target.neg(), target_sum)

    return kernel


def _taid_target(a: Tensor, b: Tensor, p: Tensor, t: float) -> Tensor:
    # The ends apart: 0 times -inf is no number, and t = 0 must give the student itself to the bit.
    if t == 0.0:
        return p
    if t == 1.0:
        return b.exp()
    # Not torch.lerp, which subtracts: two logits of -inf would give NaN.
    return torch.softmax((1.0 - t) * a + t * b, dim=-1)


def entropy_aware(
    mode: str = "soft",
    *,
    h_max: float | None = None,
    threshold: float = 0.8,
    alpha: float = 1.0,
    top_k: int = 16,
) -> Kernel:
    """Forward and reverse KL, weighed by the teacher's entropy: see ``entropy_opd``."""
    require(
        mode in ("soft", "paper"),
        f"the entropy-aware mode is {mode!r}",
        fix="Use 'soft' or 'paper'.",
    )
    if h_max is not None:
        positive(h_max, "h_max")
    require(top_k >= 1, f"top_k is {top_k}", fix="Give at least 1.")
    if mode == "soft":
        return _soft_gate(h_max)
    return _indicator(threshold, alpha, top_k)


def _soft_gate(h_max: float | None) -> Kernel:
    def kernel(a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, Callable[[], Slope]]:
        q = b.exp()
        # A vocabulary of one has no entropy to divide by, and no gate to open.
        ceiling = max(math.log(b.size(-1)), torch.finfo(b.dtype).tiny) if h_max is None else h_max
        weight = (entropy(b, q) / ceiling).clamp_(0.0, 1.0)
        forward, _ = _expectation(q, b - a)
        reverse, gap = _expectation(p, a - b)
        # A closed gate counts nothing, even of an infinite divergence; a NaN is no closed gate.
        value = torch.where(weight == 0, 0.0, weight * forward)
        value = value + torch.where(weight == 1, 0.0, (1.0 - weight) * reverse)

        def slope() -> Slope:
            w = weight.unsqueeze(-1)
            total = (1.0 - weight) * (reverse + 1.0) - weight
            part = gap.add_(1.0).mul_(p).mul_(1.0 - w)
            if not bool(reverse.isfinite().all()):
                part.masked_fill_(w >= 1, 0.0)
                total = torch.where(weight < 1, total, -1.0)
            return part.sub_(q.mul_(w)), total.unsqueeze(-1)

        return value, slope

    return kernel


def _indicator(threshold: float, alpha: float, top_k: int) -> Kernel:
    def kernel(a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, Callable[[], Slope]]:
        best, where = b.topk(min(top_k, b.size(-1)), dim=-1)
        q = best.exp()
        gate = alpha * (entropy(b, b.exp()) > threshold).to(b.dtype)
        forward, _ = _expectation(q, best - a.gather(-1, where))
        reverse, gap = _expectation(p, a - b)
        value = reverse + torch.where(gate > 0, gate * forward, 0.0)

        def slope() -> Slope:
            weights = q * gate.unsqueeze(-1)
            total = reverse + 1.0 - weights.sum(-1)
            part = gap.add_(1.0).mul_(p)
            return part.scatter_add_(-1, where, weights.neg_()), total.unsqueeze(-1)

        return value, slope

    return kernel


def entropy(log_probs: Tensor, probs: Tensor) -> Tensor:
    """-Σ q·log q over the last dimension, in nats."""
    return -_expectation(probs, log_probs)[0]


def _dot(weights: Tensor, terms: Tensor) -> Tensor:
    # Not einsum: a matrix product is rounded to bf16 under autocast, and to TF32 where allowed.
    return (weights * terms).sum(-1)


def _expectation(weights: Tensor, terms: Tensor) -> tuple[Tensor, Tensor]:
    """Σ weights·terms, and the terms with those of zero weight made finite.

    Infinite terms are rare and cost two more passes, so they are looked for in the sum.
    """
    total = _dot(weights, terms)
    if bool(total.isfinite().all()):
        return total, terms
    terms = terms.masked_fill(weights == 0, 0.0)
    return _dot(weights, terms), terms
