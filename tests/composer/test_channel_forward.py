"""Channel 2's passes: when the output head stands for the logits, and in which precision."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import tiny
import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen2ForCausalLM

from diloco_cloud.composer.channels import ChannelLoss, SDPOOptions
from diloco_cloud.composer.evaluation_mode import evaluation_mode
from diloco_cloud.composer.forward import ChannelForward
from diloco_cloud.composer.hinted_rollouts import paired_turns
from diloco_cloud.composer.turns import Turns

TURNS = [torch.tensor([3, 4, 5]), torch.tensor([6, 7])]
STUDENT = Turns.flush_right([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], TURNS, 0)
TEACHER = Turns.flush_right([torch.tensor([5, 6, 7, 11]), torch.tensor([8, 9, 13])], TURNS, 0)


def gradients(passes: ChannelForward, model: nn.Module) -> tuple[ChannelLoss, torch.Tensor]:
    model.zero_grad()
    found = passes.distill(model, STUDENT, TEACHER, SDPOOptions(jsd_beta=0.0))
    found.loss.backward()  # type: ignore[no-untyped-call]
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return found, torch.cat(grads)


def test_forward_under_bf16_autocast_keeps_the_head(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.model(hidden_size=64, vocab_size=500, initializer_range=0.2)
    # As Accelerator.prepare does with mixed_precision="bf16".
    autocast: Any = torch.autocast("cpu", torch.bfloat16)
    model.forward = convert_outputs_to_fp32(autocast(model.forward))
    passes, plain = ChannelForward(model), ChannelForward(model, may_use_head=False)
    (fused, mine), (reference, expected) = gradients(passes, model), gradients(plain, model)
    assert passes.uses_head
    assert fused.loss.item() == pytest.approx(reference.loss.item(), rel=1e-5)
    assert (mine - expected).norm() < 0.01 * expected.norm()
    assert "materialises logits: the output head is sharded" in caplog.text
    assert caplog.text.count("materialises") == 1


def test_forward_reads_what_the_head_is_given_and_nothing_more() -> None:
    model = tiny.model()
    asked: list[bool] = []
    projected: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: asked.append(kwargs.get("output_hidden_states", False)),
        with_kwargs=True,
    )
    model.lm_head.register_forward_hook(lambda _, args, out: projected.append(out.size(1)))
    passes, plain = ChannelForward(model), ChannelForward(model, may_use_head=False)
    found, mine = gradients(passes, model)
    assert (projected, asked) == ([1, 1], [False, False])
    reference, expected = gradients(plain, model)
    torch.testing.assert_close(found.loss, reference.loss)
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-7)


class Capped(Qwen2ForCausalLM):
    """A soft cap that no configuration tells of, and that small logits do not show."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = 30 * torch.tanh(output.logits / 30)
        return output


def compiled() -> nn.Module:
    model = tiny.model()
    model.compile(backend="eager")
    return model


def gemma() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, final_logit_softcapping=30.0))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (gemma, "the model's final_logit_softcapping changes them"),
        (lambda: Capped(tiny.model().config), "the model changes them behind the output head"),
        (compiled, "a compiled model"),
    ],
    ids=["told by the configuration", "found by numbers", "compiled"],
)
def test_forward_tells_why_the_head_cannot_stand_for_the_logits(
    caplog: pytest.LogCaptureFixture, make: Any, told: str
) -> None:
    model = make()
    passes = ChannelForward(model)
    with caplog.at_level(logging.WARNING, "diloco_cloud"):
        _, mine = gradients(passes, model)
    assert not passes.uses_head
    _, expected = gradients(ChannelForward(model, may_use_head=False), model)
    assert torch.equal(mine, expected)
    assert told in caplog.text


def test_forward_of_a_row_that_no_token_counts_of_has_a_gradient_of_zero() -> None:
    zeros = torch.zeros(1, 3, dtype=torch.long)
    inputs = {
        "completion_ids": torch.tensor([[3, 4, 5]]),
        "sdpo_loss_mask": zeros,
        "ctx_teacher_prompt_ids": zeros,
        "ctx_teacher_prompt_mask": zeros,
        "prompt_ids": torch.tensor([[6, 7]]),
        "prompt_mask": torch.ones(1, 2, dtype=torch.long),
    }
    turns = paired_turns(inputs, 0, at_least_one=True)
    assert turns is not None
    for may_use_head in (True, False):
        model = tiny.model()
        passes = ChannelForward(model, may_use_head=may_use_head)
        found = passes.distill(model, *turns, SDPOOptions())
        assert found.idle is not None
        assert found.loss.item() == 0
        # A process that did not go back through a sharded model would leave the others waiting.
        found.loss.backward()  # type: ignore[no-untyped-call]
        reached = [p.grad for p in model.model.layers.parameters()]
        assert all(grad is not None and not grad.any() for grad in reached)


def test_evaluation_mode_leaves_modules_as_they_were() -> None:
    model = tiny.model().train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before
    ChannelForward(model).distill(model, STUDENT, TEACHER, SDPOOptions())
    assert [module.training for module in model.modules()] == before
