"""Entropy-aware on-policy distillation: forward KL where the teacher is unsure."""

from __future__ import annotations

import torch
from torch import Tensor

from diloco_cloud.composer.losses.checks import known_reduction, require, same_logits, zero_one
from diloco_cloud.composer.losses.divergences import entropy, entropy_aware
from diloco_cloud.composer.losses.jsd import reduce_tokens
from diloco_cloud.composer.losses.rowwise import blocks, divergence_rows, paired_rows, working_dtype


def entropy_aware_opd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    labels: Tensor | None = None,
    h_max: float | None = None,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    mode: str = "soft",
    threshold: float = 0.8,
    alpha: float = 1.0,
    top_k: int = 16,
) -> Tensor:
    """Forward and reverse KL, each where it serves: two losses under one name.

    ``mode="soft"``: ``w·KL(q‖p) + (1-w)·KL(p‖q)`` with ``w = clamp(H(q)/h_max, 0, 1)``: a gate
    that opens with the teacher's entropy H, all forward KL at ``h_max``.

    ``mode="paper"`` (Jin et al., arXiv:2603.07079): reverse KL everywhere, plus
    ``alpha·1[H(q) > threshold]`` times the forward KL over the teacher's ``top_k`` tokens, with
    their probabilities as they are, not renormalised. The authors estimate the reverse KL from
    the sampled token by policy gradient; here it is the exact sum, of which theirs is an
    unbiased estimate.

    Both vanish where student and teacher agree, and both take the entropy of the teacher at
    ``temperature``.

    Args:
        student_logits: (B, T, V), floating; gets the gradient.
        teacher_logits: (B, T, V); a constant.
        labels: (B, T) of 0 and 1 or bool: tokens that count. Not -100: that is JSD's convention.
        h_max: nats, of ``"soft"``; None for log V.
        temperature: divides both logits.
        reduction: as :func:`generalized_jsd_loss`.
        mode: ``"soft"`` or ``"paper"``.
        threshold: nats, of ``"paper"``.
        alpha: weight of the forward KL in ``"paper"``.
        top_k: tokens of the forward KL in ``"paper"``.

    Returns:
        Scalar, or (B, T) for ``"none"``.

    Raises:
        ConfigError: shapes that differ, labels other than 0 and 1, a number out of its range, or
            an unknown reduction or mode.
    """
    known_reduction(reduction)
    same_logits(student_logits, teacher_logits)
    kernel = entropy_aware(mode, h_max=h_max, threshold=threshold, alpha=alpha, top_k=top_k)
    if labels is not None:
        require(
            labels.shape == student_logits.shape[:-1],
            f"labels have shape {tuple(labels.shape)}, the logits {tuple(student_logits.shape)}",
            fix="Give one entry for every token: (B, T) for logits of (B, T, V).",
        )
        zero_one(labels, "labels")
    rows, _ = paired_rows(student_logits, teacher_logits, labels)
    per_token = divergence_rows(
        student_logits, teacher_logits, kernel, rows=rows, temperature=temperature
    )
    return reduce_tokens(per_token, rows, student_logits.shape[:-1], reduction, labels is not None)


def teacher_entropy(teacher_logits: Tensor) -> Tensor:
    """Entropy of each token's distribution, in nats: 0 for a certain one, log V for a uniform.

    Args:
        teacher_logits: (..., V).

    Returns:
        (...), fp32, or fp64 for fp64 logits, without gradient.
    """
    with torch.no_grad():
        shape, vocabulary = teacher_logits.shape[:-1], teacher_logits.size(-1)
        flat = teacher_logits.reshape(-1, vocabulary)
        result = flat.new_empty(flat.size(0), dtype=working_dtype(flat))
        for block in blocks(flat.size(0), vocabulary, flat.device):
            log_probs = torch.log_softmax(flat[block], dim=-1, dtype=result.dtype)
            result[block] = entropy(log_probs, log_probs.exp())
        return result.view(shape)
