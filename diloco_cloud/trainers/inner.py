"""The inner optimisation of one replica: AdamW on next-token loss, and the judging of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The cosine ends at this part of the peak.
_FINAL_LR_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True)
class InnerSchedule:
    """Linear warm-up, then cosine decay: a function of the inner step, so restarts continue it.

    Attributes:
        peak: highest learning rate.
        warmup_steps: inner steps until it is reached.
        total_steps: inner steps of the whole run.
    """

    peak: float
    warmup_steps: int
    total_steps: int

    def learning_rate(self, step: int) -> float:
        """The learning rate of inner step ``step``, 0-based."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        cosine = (1 + math.cos(math.pi * min(done, 1.0))) / 2
        return self.peak * (_FINAL_LR_FRACTION + (1 - _FINAL_LR_FRACTION) * cosine)


def make_optimizer(model: PreTrainedModel, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with the betas usual for language models; matrices decay, vectors don't."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def next_token_loss(model: Callable[..., Any], windows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per token; bf16 matrix products on CUDA, fp32 loss.

    Args:
        model: a causal language model, or its forward.
        windows: int64 ids, shape (batch, sequence_length + 1), on the model's device.
    """
    on_cuda = windows.device.type == "cuda"
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=on_cuda):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def compute_gradients(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    windows: torch.Tensor,
    *,
    learning_rate: float,
    gradient_clip: float,
) -> float:
    """Everything of an inner step up to ``optimizer.step()``; returns nats per token."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad(set_to_none=True)
    loss = next_token_loss(model, windows)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_clip)
    return float(loss.detach())


@torch.no_grad()
def validation_loss(
    model: PreTrainedModel,
    windows: torch.Tensor,
    *,
    parameters: Mapping[str, torch.Tensor] | None = None,
    batch_size: int = 16,
) -> float:
    """Mean cross-entropy over all of ``windows``, in nats per token.

    Args:
        model: a causal language model; left as it was.
        windows: int64 ids, shape (windows, sequence_length + 1), on any device.
        parameters: used instead of the model's own, by name.
        batch_size: windows per forward pass.
    """

    def forward(**inputs: Any) -> Any:
        return torch.func.functional_call(model, dict(parameters or {}), kwargs=inputs)

    was_training = model.training
    model.eval()  # type: ignore[no-untyped-call]
    try:
        losses = [
            next_token_loss(forward, batch.to(model.device)).double() * len(batch)
            for batch in torch.split(windows, batch_size)
        ]
    finally:
        model.train(was_training)
    return float(torch.stack(losses).sum()) / len(windows)


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
