"""Log-probabilities of given tokens and sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from diloco_cloud.composer.losses.checks import require, token_mask
from diloco_cloud.composer.losses.rowwise import blocks, scatter_rows, take, working_dtype


def token_logprobs(logits: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """log softmax(logits)[id] of each token, in blocks: no second copy of the logits.

    TRL's ``selective_log_softmax`` is the same function; it computes unmasked positions too, and
    its backward makes a softmax of all of them beside the gradient.

    Args:
        logits: (B, T, V), the distribution **of** the token at the same position.
        ids: (B, T) token ids.
        mask: (B, T) of 0 and 1 or bool: tokens that are wanted; None for all.

    Returns:
        (B, T) in fp32, or fp64 for fp64 logits; zero where the mask is.

    Raises:
        ConfigError: shapes that do not fit, or a mask of other values than 0 and 1.
    """
    require(
        logits.shape[:-1] == ids.shape,
        f"the logits have shape {tuple(logits.shape)}, the token ids {tuple(ids.shape)}",
        fix="Give one distribution for every token.",
    )
    if mask is not None:
        token_mask(mask, ids, "the mask")
    wanted = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    rows = wanted.reshape(-1).nonzero().squeeze(-1)
    chosen: Tensor = _Selected.apply(  # type: ignore[no-untyped-call]
        logits, ids.reshape(-1)[rows], rows, torch.is_grad_enabled() and logits.requires_grad
    )
    return (
        torch.zeros(ids.numel(), dtype=chosen.dtype, device=ids.device)
        .index_put((rows,), chosen)
        .view(ids.shape)
    )


def sequence_logprobs(logits: Tensor, input_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Summed log-probability of each sequence's response, as DPO accounts for it.

    Args:
        logits: (B, T, V), a causal model's output for ``input_ids``: position t holds the
            distribution of token t + 1.
        input_ids: (B, T).
        response_mask: (B, T) of 0 and 1 or bool: response tokens. The first token of a sequence
            has no distribution and never counts.

    Returns:
        (B,), zero for a sequence without a response token.

    Raises:
        ConfigError: shapes that do not fit, or a mask of other values than 0 and 1.
    """
    per_token, mask = response_logprobs(logits, input_ids, response_mask)
    return masked_sum(per_token, mask)


def response_logprobs(
    logits: Tensor, input_ids: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """(B, T - 1) log-probabilities of tokens 1…T-1, and the mask that goes with them."""
    token_mask(response_mask, input_ids, "the response mask")
    require(
        logits.shape[:-1] == input_ids.shape,
        f"the logits have shape {tuple(logits.shape)}, the token ids {tuple(input_ids.shape)}",
        fix="Give the model's output for these very ids.",
    )
    mask = response_mask[:, 1:]
    return token_logprobs(logits[:, :-1], input_ids[:, 1:], mask), mask


def avg_sequence_logprob(model_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Mean log-probability over each sequence's response tokens, SimPO's reward before β.

    Args:
        model_logprobs: (B, T), one log-probability per token.
        response_mask: (B, T) of 0 and 1 or bool.

    Returns:
        (B,); zero, and no gradient, for a sequence without a response token.

    Raises:
        ConfigError: the shapes differ, or the mask has other values.
    """
    token_mask(response_mask, model_logprobs, "response_mask")
    return masked_mean(model_logprobs, response_mask)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the last dimension where the mask is not 0; -inf elsewhere does no harm."""
    return torch.where(mask != 0, values, 0.0).sum(-1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the last dimension where the mask is not 0; zero where it is 0 throughout."""
    return masked_sum(values, mask) / (mask != 0).sum(-1).clamp(min=1)


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, rows: Tensor, gradient: bool) -> Tensor:
        values = logits.new_empty(rows.numel(), dtype=working_dtype(logits))
        grads = logits.new_empty((rows.numel() if gradient else 0, logits.size(-1)))
        for block in blocks(rows.numel(), logits.size(-1), logits.device):
            log_probs = torch.log_softmax(take(logits, rows[block]).to(values.dtype), dim=-1)
            own = ids[block].unsqueeze(-1)
            values[block] = log_probs.gather(-1, own).squeeze(-1)
            if gradient:
                # d log p[id] / d logit = [v = id] - p[v]
                slope = log_probs.exp_().neg_()
                grads[block] = slope.scatter_add_(-1, own, torch.ones_like(own, dtype=slope.dtype))
        ctx.shape = logits.shape
        ctx.save_for_backward(grads, rows)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values: Tensor) -> tuple[Tensor | None, ...]:
        grads, rows = ctx.saved_tensors
        return scatter_rows(grads, grad_values, rows, ctx.shape), None, None, None
