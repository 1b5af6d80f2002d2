"""build_batch: ten keys, real alignment, a tokenizer of any make."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from diloco_cloud.composer import build_batch, compose_loss

KEYS = {
    *("input_ids", "response_mask", "ctx_teacher_input_ids", "sdpo_loss_mask"),
    *(f"dpo_{s}_{k}" for s in ("chosen", "rejected") for k in ("input_ids", "response_mask")),
    *("dpo_chosen_ref_logprobs", "dpo_rejected_ref_logprobs"),
}


class Letters:
    """A tokenizer by duck type: one token per character."""

    pad_token_id = 0
    eos_token = "\x03"

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def text(ids: torch.Tensor) -> str:
    return "".join(chr(i) for i in ids.tolist())


class Bigrams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(128, 128)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        seen = self.table(input_ids).cumsum(1) / 9
        return SimpleNamespace(logits=seen)


@pytest.mark.parametrize("variant", ["factorial", "binary_search"])
@pytest.mark.parametrize("aligned", [False, True])
def test_batch_has_the_documented_keys(variant: str, aligned: bool) -> None:
    batch = build_batch(Letters(), variant=variant, align_sdpo_shapes=aligned)
    assert set(batch) == KEYS
    for key, tensor in batch.items():
        assert tensor.dim() == (1 if "ref" in key else 2)
        if key.endswith("mask"):
            assert tensor.any(dim=1).all()
            assert set(tensor.unique().tolist()) <= {0, 1}
    same = batch["ctx_teacher_input_ids"].shape == batch["input_ids"].shape
    assert same == aligned


def test_aligned_teacher_reads_the_hint_and_judges_the_same_tokens() -> None:
    batch = build_batch(Letters(), align_sdpo_shapes=True)
    assert torch.equal(batch["sdpo_loss_mask"], batch["response_mask"])
    for row in range(2):
        marked = batch["sdpo_loss_mask"][row] == 1
        own, teacher = batch["input_ids"][row], batch["ctx_teacher_input_ids"][row]
        assert torch.equal(own[marked], teacher[marked])
        assert "Hint" not in text(own)
        assert not torch.equal(own[~marked], teacher[~marked])
    assert "Give the recursion an end." in text(batch["ctx_teacher_input_ids"][0])


@pytest.mark.parametrize("variant", ["factorial", "binary_search"])
def test_every_channel_learns_from_an_aligned_batch(variant: str) -> None:
    torch.manual_seed(0)
    model = Bigrams()
    batch = build_batch(Letters(), variant=variant, align_sdpo_shapes=True)
    out = compose_loss(model, batch, strict=True)
    for part in (out.lm_ce, out.sdpo_jsd, out.trace_replay_dpo):
        (gradient,) = torch.autograd.grad(part, model.table.weight, retain_graph=True)
        assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0


def test_the_seed_decides() -> None:
    one, same, other = (build_batch(Letters(), seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(one[key], same[key]) for key in KEYS)
    assert not torch.equal(one["dpo_chosen_ref_logprobs"], other["dpo_chosen_ref_logprobs"])


def test_batch_goes_to_the_device() -> None:
    batch = build_batch(Letters(), device="meta")
    assert {tensor.device.type for tensor in batch.values()} == {"meta"}


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no batch 'sorting'"):
        build_batch(Letters(), variant="sorting")


def test_a_tokenizer_without_template_is_refused() -> None:
    class Plain(Letters):
        def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
            raise ValueError("tokenizer.chat_template is not set")

    with pytest.raises(ValueError, match="cannot format a conversation"):
        build_batch(Plain())
