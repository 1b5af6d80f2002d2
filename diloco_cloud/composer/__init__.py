"""What a replica trains: GRPO, self-distillation under hints, and trace-replay preference pairs.

Knows no store, no run and no other replica. Names are loaded when they are asked for: the losses
need torch, only the trainer needs trl.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_cloud.composer.batch import build_batch
    from diloco_cloud.composer.channels import (
        ChannelLoss,
        ReplayOptions,
        SDPOOptions,
        replay_loss,
        sdpo_loss,
        sdpo_loss_from_hidden,
    )
    from diloco_cloud.composer.collator import CollatorConfig, ComposerDataCollator
    from diloco_cloud.composer.compose import LossComponents, compose_loss
    from diloco_cloud.composer.losses import (
        TAIDScheduler,
        avg_sequence_logprob,
        dpo_loss,
        entropy_aware_opd_loss,
        fused_jsd_loss,
        generalized_jsd_loss,
        sequence_logprobs,
        simpo_loss,
        taid_loss,
        teacher_entropy,
        token_logprobs,
    )
    from diloco_cloud.composer.trace import TokenizerLike, TraceExample, TraceTurn
    from diloco_cloud.composer.trainer import ComposerReplicationTrainer

_HOMES = {
    "build_batch": "batch",
    "ChannelLoss": "channels",
    "ReplayOptions": "channels",
    "SDPOOptions": "channels",
    "replay_loss": "channels",
    "sdpo_loss": "channels",
    "sdpo_loss_from_hidden": "channels",
    "CollatorConfig": "collator",
    "ComposerDataCollator": "collator",
    "LossComponents": "compose",
    "compose_loss": "compose",
    "TAIDScheduler": "losses",
    "avg_sequence_logprob": "losses",
    "dpo_loss": "losses",
    "entropy_aware_opd_loss": "losses",
    "fused_jsd_loss": "losses",
    "generalized_jsd_loss": "losses",
    "sequence_logprobs": "losses",
    "simpo_loss": "losses",
    "taid_loss": "losses",
    "teacher_entropy": "losses",
    "token_logprobs": "losses",
    "TokenizerLike": "trace",
    "TraceExample": "trace",
    "TraceTurn": "trace",
    "ComposerReplicationTrainer": "trainer",
}

__all__ = [
    "ChannelLoss",
    "CollatorConfig",
    "ComposerDataCollator",
    "ComposerReplicationTrainer",
    "LossComponents",
    "ReplayOptions",
    "SDPOOptions",
    "TAIDScheduler",
    "TokenizerLike",
    "TraceExample",
    "TraceTurn",
    "avg_sequence_logprob",
    "build_batch",
    "compose_loss",
    "dpo_loss",
    "entropy_aware_opd_loss",
    "fused_jsd_loss",
    "generalized_jsd_loss",
    "replay_loss",
    "sdpo_loss",
    "sdpo_loss_from_hidden",
    "sequence_logprobs",
    "simpo_loss",
    "taid_loss",
    "teacher_entropy",
    "token_logprobs",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
