"""Each channel's gradient by itself, and their sum, in the real trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig
from trl import GRPOTrainer

from diloco_cloud.composer.losses import sequence_logprobs
from diloco_cloud.composer.trainer import ComposerReplicationTrainer

pytestmark = tiny.pytestmark


def spread(completions: list[Any], **_: Any) -> list[float]:
    """A reward in which completions of one prompt hardly ever tie."""
    return [
        sum(int(word[1:]) for word in c[0]["content"].split() if word[1:].isdigit()) / 50
        for c in completions
    ]


def flat(loss: torch.Tensor, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    zeros = (torch.zeros_like(p) for p in parameters)
    return torch.cat([(z if g is None else g).flatten() for g, z in zip(found, zeros, strict=True)])


class Probe(ComposerReplicationTrainer):
    """Takes the first micro-batch's gradients, channel by channel and in all."""

    gradients: dict[str, torch.Tensor]

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not hasattr(self, "gradients"):
            losses = {
                "grpo": GRPOTrainer._compute_loss(self, model, inputs),
                "sdpo": self._compute_sdpo_loss(model, inputs),
                "replay": self._compute_trace_replay_loss(model, inputs),
                "all": super()._compute_loss(model, inputs),
            }
            self.gradients = {name: flat(loss, parameters) for name, loss in losses.items()}
        return super()._compute_loss(model, inputs)


def probe(where: Path, args: dict[str, Any] | None = None, **changes: Any) -> Probe:
    settings: dict[str, Any] = {
        "model": tiny.model(),
        "reward_funcs": [spread],
        "train_dataset": tiny.rows(),
        "processing_class": tiny.tokenizer(),
        "dpo_pairs": tiny.pairs(),
        "alpha_sdpo": 0.5,
        "beta_replay": 0.25,
        **changes,
    }
    return Probe(args=tiny.config(where, max_steps=1, **(args or {})), **settings)


def assert_live(gradients: dict[str, torch.Tensor]) -> None:
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), name
        assert gradient.norm() > 1e-7, name
    total = gradients["grpo"] + 0.5 * gradients["sdpo"] + 0.25 * gradients["replay"]
    torch.testing.assert_close(gradients["all"], total, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sdpo_wrapper": "taid", "taid_t": 0.5, "dpo_variant": "simpo"},
        {"sdpo_wrapper": "entropy_opd", "sdpo_temperature": 2.0},
    ],
    ids=["jsd+dpo", "taid+simpo", "entropy_opd"],
)
def test_trainer_each_channel_has_a_gradient_and_the_total_is_their_sum(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    trainer = probe(tmp_path, **options)
    trainer.train()
    assert_live(trainer.gradients)


def test_trainer_under_lora_and_checkpointing_has_all_gradients(tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer = probe(tmp_path, {"activation_checkpointing": True}, peft_config=lora)
    frozen = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    with torch.no_grad(), trainer.model.disable_adapter():
        expected = trainer._replay.pairs.pairs[0]
        base = trainer._score_pairs(trainer._replay._tensors([expected], None, torch.device("cpu")))
    trainer.train()
    assert_live(trainer.gradients)
    for name, parameter in trainer.model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name
    # The adapter begins as noise here: the reference is the model without it.
    (known,) = trainer._replay.reference.of([expected])
    assert known == pytest.approx([float(side) for side in base])


def test_trainer_sequence_logprobs_are_those_of_the_whole_forward_pass(tmp_path: Path) -> None:
    trainer = probe(tmp_path)
    ids = torch.randint(3, 30, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros_like(ids)
    mask[0, 4:7], mask[1, 6:] = 1, 1
    expected = sequence_logprobs(trainer.model(ids).logits, ids, mask)
    torch.testing.assert_close(trainer._sequence_logprobs(trainer.model, ids, mask), expected)


@pytest.mark.parametrize("channel", ["alpha_sdpo", "beta_replay"])
def test_trainer_with_a_weight_of_zero_is_exactly_without_the_channel(
    tmp_path: Path, channel: str
) -> None:
    without = {
        "alpha_sdpo": {"train_dataset": tiny.rows(hints=False)},
        "beta_replay": {"dpo_pairs": None},
    }
    ends = []
    for changes in ({channel: 0.0}, without[channel]):
        trainer = tiny.trainer(tmp_path, **changes)
        trainer.train()
        ends.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert torch.equal(*ends)
