"""Losses over preference pairs: DPO and SimPO.

TRL 1.16 has both, as branches inside its trainers (``DPOTrainer``, ``CPOTrainer.cpo_loss``),
where they cannot be called on tensors; the tests hold these against them.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from diloco_cloud.composer.losses.checks import finite, require, same_shape


def dpo_loss(
    policy_chosen_logprobs: Tensor,
    policy_rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Direct preference optimisation: -log σ(β·[(π_c - ref_c) - (π_r - ref_r)]).

    Rafailov et al., arXiv:2305.18290, Eq. 7; label smoothing ε mixes in the loss of the reversed
    pair, ``-(1-ε)·log σ(x) - ε·log σ(-x)`` (conservative DPO).

    Args:
        policy_chosen_logprobs: (B,), summed over the preferred response; gets a gradient.
        policy_rejected_logprobs: (B,), of the other; gets a gradient.
        ref_chosen_logprobs: (B,), the reference policy's.
        ref_rejected_logprobs: (B,).
        beta: how strongly the policy is held to the reference.
        label_smoothing: ε, in [0, 0.5).

    Returns:
        Scalar, the mean over pairs.

    Raises:
        ConfigError: shapes differ, or ε is out of its range.
    """
    for name, other in (
        ("policy_rejected_logprobs", policy_rejected_logprobs),
        ("ref_chosen_logprobs", ref_chosen_logprobs),
        ("ref_rejected_logprobs", ref_rejected_logprobs),
    ):
        same_shape(other, policy_chosen_logprobs, name)
    chosen = policy_chosen_logprobs - ref_chosen_logprobs
    rejected = policy_rejected_logprobs - ref_rejected_logprobs
    return dpo_terms(beta * (chosen - rejected), label_smoothing=label_smoothing).mean()


def simpo_loss(
    chosen_avg_logprobs: Tensor,
    rejected_avg_logprobs: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> Tensor:
    """Reference-free preference optimisation: -log σ(β·(avg_c - avg_r) - γ).

    Meng et al., arXiv:2405.14734, Eq. 6. The authors' code has β = 2 and γ/β = 0.25; γ here is
    the margin itself, as in the paper.

    Args:
        chosen_avg_logprobs: (B,), mean log-probability per token of the preferred response
            (:func:`avg_sequence_logprob`); gets a gradient.
        rejected_avg_logprobs: (B,), of the other; gets a gradient.
        beta: scale of the difference.
        gamma: margin by which the preferred response must lead.

    Returns:
        Scalar, the mean over pairs.

    Raises:
        ConfigError: the shapes differ, or γ is not finite.
    """
    same_shape(rejected_avg_logprobs, chosen_avg_logprobs, "rejected_avg_logprobs")
    return simpo_terms(beta * (chosen_avg_logprobs - rejected_avg_logprobs), gamma=gamma).mean()


def dpo_terms(margin: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """(B,) DPO losses of margins already scaled by β."""
    require(
        0.0 <= label_smoothing < 0.5,
        f"label_smoothing is {label_smoothing}",
        fix="Give a probability from 0 to below 0.5.",
    )
    if label_smoothing == 0.0:
        return -F.logsigmoid(margin)
    return -(1.0 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def simpo_terms(margin: Tensor, *, gamma: float) -> Tensor:
    """(B,) SimPO losses of margins already scaled by β."""
    finite(gamma, "simpo_gamma")
    return -F.logsigmoid(margin - gamma)
