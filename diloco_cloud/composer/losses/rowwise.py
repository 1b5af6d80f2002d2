"""Runs a divergence over (B, T, V) a few tokens at a time, forward and backward at once.

The plain formula keeps some ten tensors of the size of the logits for autograd: 12 GB for one
sequence of 2048 tokens and 150k words. Here a block of tokens, small enough for the processor's
cache, is taken through value and derivative together, and all that stays is the gradient's rows
of the tokens that count, in the logits' own dtype. Neither pair of logits is kept: a caller who
drops them holds one copy until the backward pass, where the plain formula holds them all.

Arithmetic is in fp32 for 16-bit logits, else in the logits' precision. The teacher is a constant.
There is no second derivative.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from diloco_cloud.composer.losses.checks import positive, require, zero_one
from diloco_cloud.composer.losses.divergences import Kernel

__all__ = ["Kernel", "divergence_rows", "paired_rows", "take"]

#: Elements of one block: some cache-resident megabytes on a CPU, enough to fill a GPU elsewhere.
CPU_BLOCK = 1 << 21
GPU_BLOCK = 1 << 24
#: Probabilities below it count as it (and get no gradient); OPSD's choice.
SMALLEST_PROBABILITY = 1e-8


def paired_rows(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    *,
    student_mask: Tensor | None = None,
    last: str = "logits",
) -> tuple[Tensor, Tensor]:
    """Flat indices of the tokens that count, in the student's rows and in the teacher's.

    Args:
        student: (B, T_s, X).
        teacher: (B, T_t, Y).
        mask: (B, T_t) of 0 and 1 or bool; None for every position.
        student_mask: (B, T_s); None where both are aligned position by position.
        last: what the last dimension holds, for the messages.

    Raises:
        ConfigError: shapes that do not fit, masks of other values than 0 and 1, or masks that pair
            different numbers of tokens.
    """
    lead, teacher_lead = student.shape[:-1], teacher.shape[:-1]
    if mask is not None:
        _fits(mask, teacher_lead, "the mask", f"the teacher's {last}")
    if student_mask is None:
        require(
            lead == teacher_lead,
            f"the student's {last} cover {tuple(lead)} positions, the teacher's "
            f"{tuple(teacher_lead)}",
            fix="Align both on the same tokens, or say where they are with a mask for each.",
        )
        rows = _marked(mask, student)
        return rows, rows
    _fits(student_mask, lead, "the student's mask", f"the student's {last}")
    require(mask is not None, "a student's mask has no teacher's to pair with", fix="Give both.")
    assert mask is not None
    require(
        torch.equal((student_mask != 0).sum(-1), (mask != 0).sum(-1)),
        f"the masks mark {(student_mask != 0).sum(-1).tolist()} tokens for the student and "
        f"{(mask != 0).sum(-1).tolist()} for the teacher",
        fix="Mark the same tokens in both, row by row.",
    )
    return _marked(student_mask, student), _marked(mask, teacher)


def _fits(mask: Tensor, lead: torch.Size, name: str, other: str) -> None:
    require(
        mask.shape == lead,
        f"{name} has shape {tuple(mask.shape)}, {other} cover {tuple(lead)} positions",
        fix="Give one entry for every token.",
    )
    zero_one(mask, name)


def _marked(mask: Tensor | None, like: Tensor) -> Tensor:
    if mask is None:
        return torch.arange(like.shape[:-1].numel(), device=like.device)
    return (mask != 0).reshape(-1).nonzero().squeeze(-1)


def take(tensor: Tensor, rows: Tensor) -> Tensor:
    """(n, X): those rows of (..., X), whatever its strides."""
    return tensor[torch.unravel_index(rows, tensor.shape[:-1])]


def divergence_rows(
    student: Tensor,
    teacher: Tensor,
    kernel: Kernel,
    *,
    rows: Tensor | None = None,
    teacher_rows: Tensor | None = None,
    temperature: float = 1.0,
    probabilities: bool = False,
) -> Tensor:
    """One divergence per token, differentiable in the student.

    Args:
        student: (..., V) logits, or probabilities.
        teacher: (..., V), of another leading shape if ``teacher_rows`` says which go together.
        kernel: from :mod:`divergences`.
        rows: (n,) distinct ascending indices into the flattened leading dimensions; None for all.
        teacher_rows: (n,), the teacher's; None for the same.
        temperature: divides both logits.
        probabilities: the inputs are probabilities, used as they are; ``temperature`` has no
            meaning then.

    Returns:
        (n,), fp32, or fp64 for fp64 logits.

    Raises:
        ConfigError: the vocabularies differ, or the temperature is not above 0.
    """
    positive(temperature, "the temperature")
    require(
        student.size(-1) == teacher.size(-1),
        f"the student's vocabulary has {student.size(-1)} entries, the teacher's "
        f"{teacher.size(-1)}",
        fix="Both must share a tokenizer and its padding.",
    )
    rows = _marked(None, student) if rows is None else rows
    result: Tensor = _Rowwise.apply(  # type: ignore[no-untyped-call]
        student,
        teacher.detach(),
        kernel,
        rows,
        rows if teacher_rows is None else teacher_rows,
        temperature,
        probabilities,
        torch.is_grad_enabled() and student.requires_grad,
    )
    return result


def working_dtype(tensor: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def blocks(rows: int, vocabulary: int, device: torch.device) -> Iterator[slice]:
    """Cut ``rows`` into blocks of a bounded number of elements."""
    limit = CPU_BLOCK if device.type == "cpu" else GPU_BLOCK
    step = max(1, limit // max(vocabulary, 1))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def block_divergence(
    student: Tensor,
    teacher: Tensor,
    kernel: Kernel,
    *,
    temperature: float,
    probabilities: bool = False,
    gradient: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Values (C,) of a block of logits (C, V), and the derivative in the student's (C, V)."""
    a = _log_probs(student, temperature, probabilities)
    b = _log_probs(teacher, temperature, probabilities)
    p = a.exp()
    value, slope = kernel(a, b, p)
    if not gradient:
        return value, None
    grad, slope_sum = slope()
    if probabilities:
        grad = grad.div_(p).masked_fill_(student < SMALLEST_PROBABILITY, 0.0)
    elif isinstance(slope_sum, Tensor):
        grad = grad.addcmul_(p, slope_sum, value=-1.0)
    else:
        grad = grad.add_(p, alpha=-slope_sum)
    if not probabilities and temperature != 1.0:
        grad = grad.div_(temperature)
    if not bool(value.isfinite().all()):
        # An infinite divergence has no gradient to follow; its value says so. NaN stays NaN.
        infinite = (value == torch.inf).unsqueeze(-1) & ~grad.isfinite()
        grad = grad.masked_fill_(infinite, 0.0)
    return value, grad


def _log_probs(block: Tensor, temperature: float, probabilities: bool) -> Tensor:
    dtype = working_dtype(block)
    if probabilities:
        return block.to(dtype).clamp_min(SMALLEST_PROBABILITY).log_()
    if temperature != 1.0:
        block = block.to(dtype) / temperature
    return F.log_softmax(block, dim=-1, dtype=dtype)


class _Rowwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        kernel: Kernel,
        rows: Tensor,
        teacher_rows: Tensor,
        temperature: float,
        probabilities: bool,
        gradient: bool,
    ) -> Tensor:
        count, vocabulary = rows.numel(), student.size(-1)
        values = student.new_empty(count, dtype=working_dtype(student))
        grads = student.new_empty((count if gradient else 0, vocabulary))
        for block in blocks(count, vocabulary, student.device):
            values[block], grad = block_divergence(
                take(student, rows[block]),
                take(teacher, teacher_rows[block]),
                kernel,
                temperature=temperature,
                probabilities=probabilities,
                gradient=gradient,
            )
            if grad is not None:
                grads[block] = grad
        ctx.shape = student.shape
        ctx.save_for_backward(grads, rows)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values: Tensor) -> tuple[Tensor | None, ...]:
        grads, rows = ctx.saved_tensors
        return scatter_rows(grads, grad_values, rows, ctx.shape), *(None,) * 7


def scatter_rows(grads: Tensor, scale: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """``grads`` (n, X), each row scaled, at those rows of a tensor of that shape; zero elsewhere.

    The saved rows themselves stay as they are: a graph may be walked again.
    """
    scale = scale.to(grads.dtype).unsqueeze(-1)
    if rows.numel() == shape[:-1].numel():
        return (grads * scale).view(shape)
    full = grads.new_zeros(shape)
    flat = full.view(-1, shape[-1])
    for block in blocks(rows.numel(), shape[-1], grads.device):
        flat[rows[block]] = grads[block] * scale[block]
    return full
