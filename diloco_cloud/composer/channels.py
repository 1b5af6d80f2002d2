"""The composer's channels 2 and 3 as pure functions: tensors in, a loss and its counters out.

The verification harness (:func:`diloco_cloud.composer.compose_loss`) and the trainer both call
these, so the mathematics of a channel exists once. Neither function knows a model, a batch
dictionary or a weight: the caller runs the model, and multiplies by alpha and beta.

A channel that finds nothing to learn from returns a zero **and says why** in
:attr:`ChannelLoss.idle`; it never returns a zero that looks like a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diloco_cloud.composer.losses import fused, preference, rowwise
from diloco_cloud.composer.losses.checks import require, token_mask
from diloco_cloud.composer.losses.logprobs import masked_mean, masked_sum
from diloco_cloud.composer.options import (
    DPOVariant,
    EntropyMode,
    ReplayOptions,
    SDPOOptions,
    SDPOWrapper,
)

__all__ = [
    "ChannelLoss",
    "DPOVariant",
    "EntropyMode",
    "ReplayOptions",
    "SDPOOptions",
    "SDPOWrapper",
    "idle",
    "replay_loss",
    "sdpo_loss",
    "sdpo_loss_from_hidden",
]

_JSD = SDPOOptions()
_DPO = ReplayOptions()


@dataclass(frozen=True)
class ChannelLoss:
    """One channel's loss over one batch.

    Attributes:
        loss: scalar; carries the channel's gradient, or is a zero whose gradient is zero where
            ``idle``.
        active: tokens (channel 2) or pairs (channel 3) that the loss is a mean over.
        tokens: response tokens that took part, in both sides of the pairs for channel 3.
        skipped: rows without a masked token (channel 2), pairs with an empty side (channel 3).
        idle: why nothing was learnt, in a few words; None where ``active > 0``.
        metrics: scalars without gradient, for the log: ``loss``, the mean over ``active`` (not over
            ``num_items``), and further means over ``active``; what ends in ``_max`` is a maximum.
    """

    loss: Tensor
    active: int
    tokens: int
    skipped: int = 0
    idle: str | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


def idle(reason: str, *, like: Tensor, skipped: int = 0) -> ChannelLoss:
    """A channel that contributes nothing, and says why.

    Args:
        reason: in a few words.
        like: a tensor of the batch; the zero has its device, and its dtype if it is floating. It
            hangs in its graph: processes that share a sharded model must go back through it
            equally often.
        skipped: rows or pairs that were there and could not be used.
    """
    # A sum of nothing, and not of zeros: 0 times an infinite logit is no number.
    zero = like[..., :0].sum(dtype=like.dtype if like.is_floating_point() else torch.float32)
    return ChannelLoss(zero, active=0, tokens=0, skipped=skipped, idle=reason)


def sdpo_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    options: SDPOOptions = _JSD,
    *,
    student_mask: Tensor | None = None,
    num_items: float | Tensor | None = None,
) -> ChannelLoss:
    """Channel 2: the student's distributions against the hinted teacher's, token by token.

    Position ``t`` of either tensor must hold the distribution **of** the token that the mask
    names at ``t``: for logits of a causal model over ``ids``, pass ``logits[:, :-1]`` with
    ``mask[:, 1:]`` (slices are not copied). Only masked positions are computed. The result is a
    mean over them; the teacher gets no gradient. Memory beyond the two inputs is one gradient
    row per masked token, see :mod:`diloco_cloud.composer.losses.rowwise`.

    Args:
        student_logits: (B, T_s, V), floating; the gradient goes here.
        teacher_logits: (B, T_t, V).
        mask: (B, T_t) of 0 and 1 or bool: the teacher's positions that count.
        options: which divergence, and how.
        student_mask: (B, T_s), the same tokens where the student has them: each row must mark as
            many positions as ``mask`` does, and they are paired in order. None where both
            sequences are aligned position by position, which then needs T_s = T_t.
        num_items: divide the sum over tokens by this in place of this batch's own number of
            tokens, for a mean over several micro-batches or replicas.

    Raises:
        ConfigError: shapes that do not fit, naming both, masks of other values than 0 and 1, or
            masks that mark different numbers.
    """
    rows, teacher_rows = rowwise.paired_rows(
        student_logits, teacher_logits, mask, student_mask=student_mask
    )
    if rows.numel() == 0:
        return idle("its mask marks no token", like=student_logits, skipped=mask.size(0))
    per_token = rowwise.divergence_rows(
        student_logits,
        teacher_logits,
        options.kernel(),
        rows=rows,
        teacher_rows=teacher_rows,
        temperature=options.softmax_temperature,
    )
    clipped = per_token if options.token_clip is None else per_token.clamp(max=options.token_clip)
    loss = clipped.sum() / (rows.numel() if num_items is None else num_items)
    return _sdpo_result(loss, per_token.detach(), mask, options)


def sdpo_loss_from_hidden(
    student_hidden: Tensor,
    teacher_hidden: Tensor,
    lm_head: torch.nn.Linear,
    mask: Tensor,
    options: SDPOOptions = _JSD,
    *,
    teacher_lm_head: torch.nn.Linear | None = None,
    student_mask: Tensor | None = None,
    num_items: float | Tensor | None = None,
) -> ChannelLoss:
    """:func:`sdpo_loss` from the states before the output head: (B, T, V) never exists.

    Gives what ``sdpo_loss(lm_head(student_hidden), lm_head(teacher_hidden), mask)`` would, and
    the same gradients in ``student_hidden`` and, where it trains, in the head. Only for models
    whose logits are the head's output as it is: not for a soft cap or a scale behind it.

    Args:
        student_hidden: (B, T_s, H), the last hidden states after the final norm.
        teacher_hidden: (B, T_t, H'); no gradient goes there.
        lm_head: ``weight`` (V, H) and ``bias`` (V,) or None.
        mask: as :func:`sdpo_loss`.
        options: as :func:`sdpo_loss`.
        teacher_lm_head: (V, H'); None for the student's own, which then gets the student's
            gradient only.
        student_mask: as :func:`sdpo_loss`.
        num_items: as :func:`sdpo_loss`.

    Raises:
        ConfigError: as :func:`sdpo_loss`.
    """
    rows, teacher_rows = rowwise.paired_rows(
        student_hidden, teacher_hidden, mask, student_mask=student_mask, last="hidden states"
    )
    if rows.numel() == 0:
        return idle("its mask marks no token", like=student_hidden, skipped=mask.size(0))
    loss, per_token = fused.fused_divergence(
        rowwise.take(student_hidden, rows),
        rowwise.take(teacher_hidden.detach(), teacher_rows),
        lm_head,
        options.kernel(),
        teacher_lm_head=teacher_lm_head,
        temperature=options.softmax_temperature,
        token_clip=options.token_clip,
        divisor=rows.numel() if num_items is None else num_items,
    )
    return _sdpo_result(loss, per_token, mask, options)


def _sdpo_result(
    loss: Tensor, per_token: Tensor, mask: Tensor, options: SDPOOptions
) -> ChannelLoss:
    metrics = {"loss": per_token.mean(), "per_token_max": per_token.max()}
    if options.token_clip is not None:
        metrics["loss"] = per_token.clamp(max=options.token_clip).mean()
        metrics["clipped"] = (per_token > options.token_clip).float().mean()
    empty = int((mask != 0).any(dim=1).logical_not().sum())
    n = per_token.numel()
    return ChannelLoss(loss, active=n, tokens=n, skipped=empty, metrics=metrics)


def replay_loss(
    chosen_logprobs: Tensor,
    chosen_mask: Tensor,
    rejected_logprobs: Tensor,
    rejected_mask: Tensor,
    options: ReplayOptions = _DPO,
    *,
    ref_chosen_logprobs: Tensor | None = None,
    ref_rejected_logprobs: Tensor | None = None,
    num_items: float | Tensor | None = None,
) -> ChannelLoss:
    """Channel 3: preference pairs, by DPO against a reference or by SimPO without one.

    A pair with no response token on one side has nothing to compare: it is left out and counted
    in ``skipped``. The result is a mean over the others. ``metrics`` holds ``margin``, the mean
    implicit reward of chosen over rejected, and ``accuracy``, the share of pairs in which it is
    positive.

    Args:
        chosen_logprobs: (P, T_c), log-probability of each token of the preferred response
            (:func:`~diloco_cloud.composer.losses.token_logprobs`); the gradient goes here.
        chosen_mask: (P, T_c) of 0 and 1 or bool: response tokens.
        rejected_logprobs: (P, T_r), of the other response; the gradient goes here too.
        rejected_mask: (P, T_r).
        options: which loss, and its constants.
        ref_chosen_logprobs: (P,), the reference policy's log-probability of each preferred
            response, summed over the same tokens. DPO needs it, SimPO ignores it.
        ref_rejected_logprobs: (P,), of the other response.
        num_items: divide the sum over pairs by this in place of the number of pairs used.

    Raises:
        ConfigError: shapes that do not fit, masks of other values than 0 and 1, or DPO without
            reference log-probabilities.
    """
    token_mask(chosen_mask, chosen_logprobs, "dpo_chosen_response_mask")
    token_mask(rejected_mask, rejected_logprobs, "dpo_rejected_response_mask")
    usable = (chosen_mask != 0).any(dim=1) & (rejected_mask != 0).any(dim=1)
    skipped = int((~usable).sum())
    if skipped == usable.numel():
        return idle("no pair has a response on both sides", like=chosen_logprobs, skipped=skipped)
    chosen, chosen_mask = chosen_logprobs[usable], chosen_mask[usable]
    rejected, rejected_mask = rejected_logprobs[usable], rejected_mask[usable]
    if options.variant == "simpo":
        scores = (
            options.simpo_beta * masked_mean(chosen, chosen_mask),
            options.simpo_beta * masked_mean(rejected, rejected_mask),
        )
        per_pair = preference.simpo_terms(scores[0] - scores[1], gamma=options.simpo_gamma)
    else:
        ref_chosen, ref_rejected = _references(ref_chosen_logprobs, ref_rejected_logprobs, usable)
        scores = (
            options.dpo_beta * (masked_sum(chosen, chosen_mask) - ref_chosen),
            options.dpo_beta * (masked_sum(rejected, rejected_mask) - ref_rejected),
        )
        per_pair = preference.dpo_terms(scores[0] - scores[1])
    pairs = per_pair.numel()
    margin = (scores[0] - scores[1]).detach()
    return ChannelLoss(
        per_pair.sum() / (pairs if num_items is None else num_items),
        active=pairs,
        tokens=int((chosen_mask != 0).sum() + (rejected_mask != 0).sum()),
        skipped=skipped,
        metrics={
            "loss": per_pair.detach().mean(),
            "margin": margin.mean(),
            "accuracy": (margin > 0).float().mean(),
        },
    )


def _references(
    chosen: Tensor | None, rejected: Tensor | None, usable: Tensor
) -> tuple[Tensor, Tensor]:
    fix = "Compute them once with the reference policy, or use dpo_variant='simpo'."
    require(
        chosen is not None and rejected is not None,
        "DPO needs the reference log-probabilities of both responses",
        fix=fix,
    )
    assert chosen is not None
    assert rejected is not None
    for name, sums in (
        ("dpo_chosen_ref_logprobs", chosen),
        ("dpo_rejected_ref_logprobs", rejected),
    ):
        require(
            sums.shape == usable.shape,
            f"{name} has shape {tuple(sums.shape)}, not {tuple(usable.shape)}",
            fix="Give one number per pair: the sum over its response tokens.",
        )
    return chosen[usable], rejected[usable]
