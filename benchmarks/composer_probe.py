"""One step of the composer's trainer: each channel's gradient, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from diloco_cloud.composer.trainer import ComposerReplicationTrainer

#: Weights of channel 2 and channel 3 in the total.
ALPHA: Final = 0.5
BETA: Final = 0.25
CHANNELS: Final = ("grpo", "sdpo", "replay")
WEIGHTS: Final = {"grpo": 1.0, "sdpo": ALPHA, "replay": BETA}


@dataclass(frozen=True)
class StepGradients:
    """Gradients of one optimizer step, each flat over all parameters.

    Attributes:
        alone: of each channel, not weighted; empty where none was asked for.
        total: what the trainer's own backward passes have left in the parameters.
    """

    alone: dict[str, Tensor]
    total: Tensor

    @property
    def weighted_sum(self) -> Tensor:
        """What the total should be."""
        result = torch.zeros_like(self.total)
        for name, gradient in self.alone.items():
            result.add_(gradient, alpha=WEIGHTS[name])
        return result


def quiet(trainer: Any) -> None:
    """Keep the figures of every step out of the output; they stay in the trainer's history."""
    trainer.remove_callback(PrinterCallback)


def settings(where: Path, **changes: Any) -> GRPOConfig:
    """What all trainers on a CPU here have in common."""
    found: dict[str, Any] = {
        "output_dir": str(where),
        "max_completion_length": 6,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "dataloader_pin_memory": False,
        "seed": 7,
        **changes,
    }
    return GRPOConfig(**found)


def step_gradients(
    model: Any,
    tokenizer: Any,
    where: Path,
    *,
    batch: int,
    accumulation: int,
    generations: int,
    each_channel: bool = True,
) -> StepGradients:
    """The gradients of one step on ``batch`` rollouts, in ``accumulation`` micro-batches.

    The model is left as it was: the step is of no length. Calls with the same model and ``batch``
    see the same rollouts and pairs, however many micro-batches they come in.

    Args:
        model: causal language model with a chat template.
        tokenizer: its.
        where: for the trainer's files.
        batch: rollouts; half of their prompts have a hint.
        accumulation: divides ``batch``.
        generations: rollouts of a prompt.
        each_channel: whether to take the channels' own gradients.
    """
    trainer = _Probe(
        model=model,
        processing_class=tokenizer,
        args=settings(
            where,
            max_steps=1,
            per_device_train_batch_size=batch // accumulation,
            gradient_accumulation_steps=accumulation,
            num_generations=generations,
            optim="sgd",
            learning_rate=0.0,
            max_grad_norm=0.0,
        ),
        reward_funcs=[_spread],
        train_dataset=Dataset.from_list(_questions()),
        dpo_pairs=_pairs(),
        replay_batch_size=4 // accumulation,
        alpha_sdpo=ALPHA,
        beta_replay=BETA,
    )
    trainer.each_channel = each_channel
    quiet(trainer)
    kept = _KeepGradient()
    trainer.add_callback(kept)
    trainer.train()
    assert kept.total is not None
    return StepGradients(trainer.alone, kept.total)


class _Probe(ComposerReplicationTrainer):
    """Adds up the channels' gradients over a step's micro-batches."""

    each_channel = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.alone: dict[str, Tensor] = {}

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        if self.each_channel:
            parts: dict[str, Callable[[Any, Any], Tensor]] = {
                "grpo": lambda m, i: GRPOTrainer._compute_loss(self, m, i),
                "sdpo": self._compute_sdpo_loss,
                "replay": self._compute_trace_replay_loss,
            }
            for name, part in parts.items():
                self._add(name, part(model, inputs), model)
        return super()._compute_loss(model, inputs)

    def _add(self, name: str, loss: Tensor, model: Any) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        total = self.alone.setdefault(name, torch.zeros(sum(p.numel() for p in parameters)))
        if not loss.requires_grad:  # a micro-batch without a hinted rollout
            return
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        place = 0
        for parameter, gradient in zip(parameters, found, strict=True):
            if gradient is not None:
                total[place : place + parameter.numel()] += gradient.flatten()
            place += parameter.numel()


class _KeepGradient(TrainerCallback):
    """Copies the accumulated gradient before the optimizer takes it."""

    total: Tensor | None = None

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.total = torch.cat(
            [
                (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                for p in model.parameters()
                if p.requires_grad
            ]
        )


def _spread(completions: list[Any], **_: Any) -> list[float]:
    """A reward in which completions of one prompt hardly ever tie."""
    texts = [completion[0]["content"] for completion in completions]
    return [len(set(text)) / 20 + sum(map(ord, text)) % 97 / 97 for text in texts]


def _asked(question: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": question},
    ]


def _questions() -> list[dict[str, Any]]:
    """Every second one has a hint."""
    return [
        {
            "prompt": _asked(f"What is {a} + {a + 3}?"),
            "hint": f"The result is {2 * a + 3}." if a % 2 else None,
        }
        for a in range(8)
    ]


def _pairs() -> list[dict[str, Any]]:
    return [
        {
            "state_messages": _asked(f"What is {a} + 2?"),
            "chosen": f"It is {a + 2}.",
            "rejected": f"I think {a}.",
        }
        for a in range(4)
    ]
