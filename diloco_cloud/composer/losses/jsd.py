"""The generalised Jensen-Shannon divergence, channel 2's plain loss."""

from __future__ import annotations

import torch
from torch import Tensor

from diloco_cloud.composer.losses.checks import known_reduction, positive, require, same_logits
from diloco_cloud.composer.losses.divergences import generalized_jsd
from diloco_cloud.composer.losses.rowwise import (
    SMALLEST_PROBABILITY,
    divergence_rows,
    paired_rows,
    working_dtype,
)

#: Positions with this label are left out, as everywhere in Hugging Face's libraries.
IGNORED = -100


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    logits_are_probs: bool = False,
    top_k: int | None = None,
    token_clip: float | None = None,
) -> Tensor:
    """Generalised JSD between student and teacher, token by token over the whole vocabulary.

    ``β·KL(q‖m) + (1-β)·KL(p‖m)`` with p the student, q the teacher and ``m = β·q + (1-β)·p``;
    KL(q‖p) at β = 0, KL(p‖q) at β = 1 (Agarwal et al., arXiv:2306.13649, Eq. 1). No T² factor.

    The signature is OPSD's and so are the values, with these differences, each on purpose.
    ``"none"`` gives one number per token where OPSD gives (n, V) or (B, T, V), so ``"mean"`` is
    a mean over tokens where OPSD's divides by V too. ``token_clip`` bounds a token's divergence
    where OPSD's bounds each of its V terms. ``top_k`` works with probabilities too. No token
    left gives zero and not NaN, and an unknown reduction raises. The teacher never gets a
    gradient. TRL 1.16's ``GKDTrainer.generalized_jsd_loss`` agrees in what it has (no ``top_k``,
    no ``token_clip``) but keeps about ten tensors of (B, T, V); this keeps one.

    Args:
        student_logits: (B, T, V), floating; gets the gradient, in its own dtype.
        teacher_logits: (B, T, V).
        labels: (B, T); positions of -100 are left out. None for all.
        beta: in [0, 1].
        temperature: divides both logits; above 0.
        reduction: ``"batchmean"``, the sum over the number of tokens left with labels, over B
            without; ``"sum"``; ``"mean"``, over the tokens left; ``"none"``.
        logits_are_probs: the inputs are probabilities, taken as they are but floored at 1e-8;
            ``temperature`` has no meaning then.
        top_k: restrict both to the teacher's k most probable tokens and renormalise.
        token_clip: ceiling of one token's divergence, in nats.

    Returns:
        Scalar, or (B, T) for ``"none"`` with zeros where labels are -100; fp32, or fp64 for fp64
        logits. ``inf`` where a divergence is infinite (its gradient is finite); never for
        0 < β < 1.

    Raises:
        ConfigError: shapes that differ, a number out of its range, or an unknown reduction.
    """
    known_reduction(reduction)
    same_logits(student_logits, teacher_logits)
    kernel = generalized_jsd(beta)
    if token_clip is not None:
        positive(token_clip, "token_clip")
    mask = None if labels is None else labels != IGNORED
    if mask is not None:
        _require_tokens(mask, student_logits)
    if top_k is not None:
        student_logits, teacher_logits = _most_probable(
            student_logits, teacher_logits, top_k, logits_are_probs
        )
        logits_are_probs, temperature = False, 1.0 if logits_are_probs else temperature
    rows, _ = paired_rows(student_logits, teacher_logits, mask)
    per_token = divergence_rows(
        student_logits,
        teacher_logits,
        kernel,
        rows=rows,
        temperature=temperature,
        probabilities=logits_are_probs,
    )
    if token_clip is not None:
        per_token = per_token.clamp(max=token_clip)
    return reduce_tokens(per_token, rows, student_logits.shape[:-1], reduction, mask is not None)


def reduce_tokens(
    per_token: Tensor, rows: Tensor, shape: torch.Size, reduction: str, masked: bool
) -> Tensor:
    """One reduction for every distillation loss.

    Args:
        per_token: (n,), of the tokens that count.
        rows: (n,), where they are in the flattened ``shape``.
        shape: (B, T).
        reduction: one of :data:`~diloco_cloud.composer.losses.checks.REDUCTIONS`.
        masked: whether the caller named the tokens: ``"batchmean"`` divides by their number
            then, by B otherwise.
    """
    if reduction == "none":
        zeros = torch.zeros(shape.numel(), dtype=per_token.dtype, device=per_token.device)
        return zeros.index_put((rows,), per_token).view(shape)
    total = per_token.sum()
    if reduction == "sum":
        return total
    if reduction == "mean" or masked or len(shape) == 0:
        return total / max(per_token.numel(), 1)
    return total / max(shape[0], 1)


def _require_tokens(labels: Tensor, logits: Tensor) -> None:
    require(
        labels.shape == logits.shape[:-1],
        f"labels have shape {tuple(labels.shape)}, the logits {tuple(logits.shape)}",
        fix="Give one label for every token: (B, T) for logits of (B, T, V).",
    )


def _most_probable(
    student: Tensor, teacher: Tensor, top_k: int, probabilities: bool
) -> tuple[Tensor, Tensor]:
    """Both restricted to the teacher's best k, as logits: their softmax renormalises."""
    require(top_k >= 1, f"top_k is {top_k}", fix="Give at least 1, or None for all tokens.")
    teacher, where = teacher.detach().topk(min(top_k, teacher.size(-1)), dim=-1)
    student = student.gather(-1, where)
    if not probabilities:
        return student, teacher

    def logs(p: Tensor) -> Tensor:
        return p.to(working_dtype(p)).clamp_min(SMALLEST_PROBABILITY).log()

    return logs(student), logs(teacher)
