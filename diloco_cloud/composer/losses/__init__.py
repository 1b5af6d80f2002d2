"""What the composer minimises: pure functions of tensors, on torch alone.

Distillation losses run a block of tokens at a time (:mod:`rowwise`), with closed-form gradients
(:mod:`divergences`), from logits or from hidden states (:mod:`fused`). Where TRL 1.16 has the
same formula, the tests hold ours against it; each docstring says why it is not TRL's that runs.
"""

from __future__ import annotations

from diloco_cloud.composer.losses.entropy_opd import entropy_aware_opd_loss, teacher_entropy
from diloco_cloud.composer.losses.fused import fused_jsd_loss
from diloco_cloud.composer.losses.jsd import generalized_jsd_loss
from diloco_cloud.composer.losses.logprobs import (
    avg_sequence_logprob,
    response_logprobs,
    sequence_logprobs,
    token_logprobs,
)
from diloco_cloud.composer.losses.preference import dpo_loss, simpo_loss
from diloco_cloud.composer.losses.taid import taid_loss
from diloco_cloud.composer.losses.taid_schedule import TAIDScheduler

__all__ = [
    "TAIDScheduler",
    "avg_sequence_logprob",
    "dpo_loss",
    "entropy_aware_opd_loss",
    "fused_jsd_loss",
    "generalized_jsd_loss",
    "response_logprobs",
    "sequence_logprobs",
    "simpo_loss",
    "taid_loss",
    "teacher_entropy",
    "token_logprobs",
]
