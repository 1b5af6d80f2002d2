"""Temporally adaptive interpolated distillation: the loss."""

from __future__ import annotations

from torch import Tensor

from diloco_cloud.composer.losses.checks import require, same_logits
from diloco_cloud.composer.losses.divergences import taid
from diloco_cloud.composer.losses.rowwise import divergence_rows, paired_rows


def taid_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor | None = None,
    *,
    t: float | Tensor,
) -> Tensor:
    """Cross-entropy to a target between the student itself and the teacher.

    ``-mean Σ_v r(v)·log p(v)`` with ``r = softmax((1-t)·stop_grad(student) + t·teacher)``, mixed
    in logits (Shing et al., *TAID*, arXiv:2501.16937, Eq. 3-5, and SakanaAI/TAID's code, whose
    values these are). At ``t = 0`` the gradient is exactly zero, whatever the teacher; at
    ``t = 1`` it is that of KL(teacher‖student), and the value is that plus the teacher's
    entropy, which the authors do not subtract either. No temperature. Where no token counts the
    loss is zero; the authors' is NaN.

    Args:
        student_logits: (B, T, V), floating; gets the gradient.
        teacher_logits: (B, T, V); a constant.
        mask: (B, T) of 0 and 1 or bool; None for all tokens.
        t: in [0, 1], such as :attr:`TAIDScheduler.t`.

    Returns:
        Scalar, the mean over the tokens that count.

    Raises:
        ConfigError: shapes that differ, a mask of other values, or ``t`` outside [0, 1].
    """
    same_logits(student_logits, teacher_logits)
    kernel = taid(float(t))
    if mask is not None:
        require(
            mask.shape == student_logits.shape[:-1],
            f"the mask has shape {tuple(mask.shape)}, the logits {tuple(student_logits.shape)}",
            fix="Give one entry for every token: (B, T) for logits of (B, T, V).",
        )
    rows, _ = paired_rows(student_logits, teacher_logits, mask)
    per_token = divergence_rows(student_logits, teacher_logits, kernel, rows=rows)
    return per_token.sum() / max(rows.numel(), 1)
