"""A batch of traces, as it is, makes channels 1 and 2 live in the composed loss."""

from __future__ import annotations

import torch
from chats import a_trace, chat_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from diloco_cloud.composer import CollatorConfig, ComposerDataCollator, compose_loss
from diloco_cloud.composer.hints import dispatch


def test_compose_loss_learns_from_the_hint() -> None:
    tokenizer = chat_tokenizer("qwen2_5")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = Qwen2ForCausalLM(config)
    collator = ComposerDataCollator(tokenizer, CollatorConfig(hint_generator=dispatch))
    batch = collator([a_trace()])
    loss = compose_loss(model, batch, alpha_sdpo=1.0, beta_replay=0.0)
    assert loss.sdpo_jsd.item() > 1e-6
    loss.sdpo_jsd.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert 0 < norm.item() < float("inf")

    # Against itself, token for token, there is nothing to learn: the masks are what aligns.
    unhinted = {
        **batch,
        "ctx_teacher_input_ids": batch["input_ids"],
        "ctx_teacher_attention_mask": batch["attention_mask"],
        "sdpo_loss_mask": batch["sdpo_student_mask"],
    }
    with torch.no_grad():
        same = compose_loss(model, unhinted, alpha_sdpo=1.0, beta_replay=0.0)
    assert same.sdpo_jsd.abs().item() < 1e-6
