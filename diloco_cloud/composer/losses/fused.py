"""Divergences from hidden states and output heads: (B, T, V) never exists, not even once.

A tile of tokens is projected by both heads, turned into its gradient in place, and folded into
the gradients of the hidden states and of the head, all in the forward pass: four matrix products
in all. TRL 1.16 has such a kernel (``trl.kernels.chunked_divergence``), which projects again for
its second pass and for its backward, eight in all, gives NaN where a logit is -inf, and has
neither a ceiling per token nor the divergences of TAID and entropy-aware distillation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from diloco_cloud.composer.losses.checks import positive, require
from diloco_cloud.composer.losses.divergences import Kernel, generalized_jsd
from diloco_cloud.composer.losses.rowwise import (
    block_divergence,
    blocks,
    paired_rows,
    take,
    working_dtype,
)

#: Elements of one tile of logits: rows enough for a good matrix product at V = 150k.
TILE = 1 << 24


def fused_jsd_loss(
    student_hidden: Tensor,
    teacher_hidden: Tensor,
    lm_head: torch.nn.Linear,
    mask: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    token_clip: float | None = None,
    teacher_lm_head: torch.nn.Linear | None = None,
) -> Tensor:
    """:func:`generalized_jsd_loss` of both models' logits, without the logits.

    Args:
        student_hidden: (B, T, H), floating: the states before the output head.
        teacher_hidden: (B, T, H'); no gradient goes there.
        lm_head: ``weight`` (V, H) and ``bias`` (V,) or None; gets a gradient if it wants one.
        mask: (B, T) of 0 and 1 or bool: tokens that count; None for all.
        beta: 0 forward KL, 0.5 JSD, 1 reverse KL.
        temperature: divides both logits.
        token_clip: the most one token may add, in nats.
        teacher_lm_head: the teacher's head, (V, H'); None for the student's own.

    Returns:
        Scalar, the mean over the tokens that count; zero with a zero gradient where none does.

    Raises:
        ConfigError: shapes that do not fit, or a number out of its range.
    """
    kernel = generalized_jsd(beta)
    rows, teacher_rows = paired_rows(student_hidden, teacher_hidden, mask, last="hidden states")
    loss, _ = fused_divergence(
        take(student_hidden, rows),
        take(teacher_hidden.detach(), teacher_rows),
        lm_head,
        kernel,
        teacher_lm_head=teacher_lm_head,
        temperature=temperature,
        token_clip=token_clip,
        divisor=max(rows.numel(), 1),
    )
    return loss


def fused_divergence(
    student_hidden: Tensor,
    teacher_hidden: Tensor,
    lm_head: torch.nn.Linear,
    kernel: Kernel,
    *,
    teacher_lm_head: torch.nn.Linear | None = None,
    temperature: float = 1.0,
    token_clip: float | None = None,
    divisor: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """The sum of one divergence per token over ``divisor``, and the divergences before the clip.

    Args:
        student_hidden: (n, H).
        teacher_hidden: (n, H').
        lm_head: the student's head, (V, H).
        kernel: from :mod:`divergences`.
        teacher_lm_head: (V, H'); None for the student's.
        temperature: divides both logits.
        token_clip: ceiling of one token's part of the sum.
        divisor: of the sum.

    Returns:
        The scalar, differentiable in the hidden states and the head, and (n,) without gradient.

    Raises:
        ConfigError: the heads' vocabularies differ, or the temperature is not above 0.
    """
    positive(temperature, "the temperature")
    teacher_lm_head = lm_head if teacher_lm_head is None else teacher_lm_head
    require(
        lm_head.weight.size(0) == teacher_lm_head.weight.size(0),
        f"the student's head has {lm_head.weight.size(0)} entries, the teacher's "
        f"{teacher_lm_head.weight.size(0)}",
        fix="Both must share a tokenizer and its padding.",
    )
    tiles = _Tiles(kernel, temperature, token_clip, torch.is_grad_enabled())
    loss, per_token = _Fused.apply(  # type: ignore[no-untyped-call]
        student_hidden,
        lm_head.weight,
        lm_head.bias,
        teacher_hidden.detach(),
        teacher_lm_head.weight.detach(),
        None if teacher_lm_head.bias is None else teacher_lm_head.bias.detach(),
        tiles,
    )
    return loss / divisor, per_token


class _Tiles:
    """What the autograd function does to a tile of logits."""

    def __init__(
        self, kernel: Kernel, temperature: float, token_clip: float | None, gradient: bool
    ) -> None:
        self.kernel = kernel
        self.temperature = temperature
        self.token_clip = token_clip
        self.gradient = gradient

    def clip(self, values: Tensor) -> Tensor:
        return values if self.token_clip is None else values.clamp(max=self.token_clip)

    def turn(self, student: Tensor, teacher: Tensor, gradient: bool) -> Tensor:
        """Values (C,) of a tile; the student's logits become the gradient of their sum."""
        values = student.new_empty(student.size(0), dtype=working_dtype(student))
        for block in blocks(student.size(0), student.size(1), student.device):
            values[block], grad = block_divergence(
                student[block],
                teacher[block],
                self.kernel,
                temperature=self.temperature,
                gradient=gradient,
            )
            if grad is not None:
                if self.token_clip is not None:
                    # As clamp: a token at the ceiling still moves, one above does not.
                    grad.masked_fill_((values[block] > self.token_clip).unsqueeze(-1), 0.0)
                student[block] = grad
        return values


def _tile_slices(rows: int, vocabulary: int) -> list[slice]:
    step = max(1, TILE // vocabulary)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(hidden, weight.to(hidden.dtype), _like(bias, hidden))


def _like(bias: Tensor | None, hidden: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(hidden.dtype)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        tiles: _Tiles,
    ) -> tuple[Tensor, Tensor]:
        wants = [tiles.gradient and wanted for wanted in ctx.needs_input_grad[:3]]
        per_token = hidden.new_empty(hidden.size(0), dtype=working_dtype(hidden))
        # The head's gradient is a sum over all tokens: in fp32 also for 16-bit weights.
        grads = [
            torch.zeros_like(t, dtype=working_dtype(t)) if t is not None and wanted else None
            for t, wanted in zip((hidden, weight, bias), wants, strict=True)
        ]
        for rows in _tile_slices(hidden.size(0), weight.size(0)):
            logits = _project(hidden[rows], weight, bias)
            teacher_logits = _project(teacher_hidden[rows], teacher_weight, teacher_bias)
            per_token[rows] = tiles.turn(logits, teacher_logits, any(wants))
            _fold(grads, rows, logits, hidden[rows], weight)
        ctx.save_for_backward(*grads)
        ctx.dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias)]
        ctx.mark_non_differentiable(per_token)
        return tiles.clip(per_token).sum(), per_token

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (
            None if grad is None else (grad * grad_loss).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None, None


def _fold(
    grads: list[Tensor | None], rows: slice, tile: Tensor, hidden: Tensor, weight: Tensor
) -> None:
    """Add a tile's gradient (C, V) to those of the hidden states, the weight and the bias."""
    of_hidden, of_weight, of_bias = grads
    if of_hidden is not None:
        of_hidden[rows] = tile @ weight.to(tile.dtype)
    if of_weight is not None:
        if of_weight.dtype == tile.dtype:
            of_weight.addmm_(tile.t(), hidden.to(tile.dtype))
        else:
            of_weight.add_(tile.t() @ hidden.to(tile.dtype))
    if of_bias is not None:
        of_bias.add_(tile.sum(0, dtype=of_bias.dtype))
