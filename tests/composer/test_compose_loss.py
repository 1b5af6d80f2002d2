"""compose_loss: three channels on a small model, each alone, off, missing and misfit."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diloco_cloud.composer import LossComponents, compose_loss, dpo_loss, generalized_jsd_loss
from diloco_cloud.composer import compose as harness

VOCABULARY = 13


class TinyModel(nn.Module):
    """Causal: a token's logits come from the mean of what precedes it and itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(6, VOCABULARY)
        self.calls: list[tuple[bool, bool]] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        self.calls.append((self.training, torch.is_grad_enabled()))
        weights = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        summed = (self.embedding(input_ids) * weights.unsqueeze(-1)).cumsum(1)
        hidden = summed / weights.cumsum(1).clamp(min=1).unsqueeze(-1)
        return SimpleNamespace(logits=self.head(self.dropout(torch.tanh(hidden))))


@pytest.fixture
def model() -> TinyModel:
    torch.manual_seed(0)
    return TinyModel().eval()


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(1)

    def ids(rows: int, length: int) -> Tensor:
        return torch.randint(VOCABULARY, (rows, length), generator=made)

    def answer(rows: int, length: int) -> Tensor:
        return (torch.arange(length) >= 3).long().expand(rows, length)

    return {
        "input_ids": ids(2, 8),
        "response_mask": answer(2, 8),
        "ctx_teacher_input_ids": ids(2, 8),
        "sdpo_loss_mask": answer(2, 8),
        "dpo_chosen_input_ids": ids(3, 6),
        "dpo_chosen_response_mask": answer(3, 6),
        "dpo_rejected_input_ids": ids(3, 7),
        "dpo_rejected_response_mask": answer(3, 7),
        "dpo_chosen_ref_logprobs": torch.tensor([-6.0, -7.0, -8.0]),
        "dpo_rejected_ref_logprobs": torch.tensor([-9.0, -8.0, -7.0]),
    }


@pytest.fixture(autouse=True)
def nothing_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_warned", set())


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger=harness.__name__)
    return caplog


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def channel_one(model: nn.Module, inputs: dict[str, Tensor], smoothing: float = 0.0) -> Tensor:
    logits = model(inputs["input_ids"]).logits[:, :-1]
    labels = inputs["input_ids"][:, 1:].masked_fill(inputs["response_mask"][:, 1:] == 0, -100)
    return F.cross_entropy(
        logits.reshape(-1, VOCABULARY), labels.reshape(-1), label_smoothing=smoothing
    )


def test_channels_are_their_formulas(model: TinyModel, inputs: dict[str, Tensor]) -> None:
    out = compose_loss(model, inputs, alpha_sdpo=0.3, beta_replay=0.2, lm_ce_label_smoothing=0.1)

    def shifted(prefix: str) -> Tensor:
        return model(inputs[f"{prefix}input_ids"]).logits[:, :-1]

    labels = torch.where(inputs["sdpo_loss_mask"][:, 1:] == 1, 0, -100)
    sdpo = generalized_jsd_loss(shifted(""), shifted("ctx_teacher_"), labels)

    def summed(prefix: str) -> Tensor:
        ids = inputs[f"{prefix}input_ids"][:, 1:]
        picked = shifted(prefix).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        return (picked * inputs[f"{prefix}response_mask"][:, 1:]).sum(-1)

    dpo = dpo_loss(
        summed("dpo_chosen_"),
        summed("dpo_rejected_"),
        inputs["dpo_chosen_ref_logprobs"],
        inputs["dpo_rejected_ref_logprobs"],
    )
    torch.testing.assert_close(out.lm_ce, channel_one(model, inputs, 0.1))
    torch.testing.assert_close(out.sdpo_jsd, sdpo)
    torch.testing.assert_close(out.trace_replay_dpo, dpo)
    torch.testing.assert_close(out.total, out.lm_ce + 0.3 * sdpo + 0.2 * dpo)
    assert out.active() == {"lm_ce": 10, "sdpo_jsd": 10, "trace_replay_dpo": 3}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sdpo_jsd_beta": 0.0, "sdpo_temperature": 2.0, "sdpo_token_clip": 5.0},
        {"sdpo_jsd_beta": 1.0, "dpo_variant": "simpo"},
        {"sdpo_wrapper": "taid", "taid_t": 0.5},
        {"sdpo_wrapper": "entropy_opd", "entropy_opd_h_max": 1.0},
        {"sdpo_wrapper": "entropy_opd", "entropy_opd_mode": "paper"},
    ],
)
def test_each_channel_has_a_live_gradient_and_they_add_up(
    model: TinyModel, inputs: dict[str, Tensor], options: dict[str, Any]
) -> None:
    out = compose_loss(model, inputs, alpha_sdpo=0.7, beta_replay=0.4, strict=True, **options)
    assert all(getattr(out, name).shape == () for name in out.detached())
    parts = [out.lm_ce, out.sdpo_jsd, out.trace_replay_dpo]
    each = [
        torch.autograd.grad(part, list(model.parameters()), retain_graph=True) for part in parts
    ]
    for channel in each:
        assert all(g.isfinite().all() and g.abs().sum() > 0 for g in channel)
    for total, one, two, three in zip(gradients(model, out.total), *each, strict=True):
        torch.testing.assert_close(total, one + 0.7 * two + 0.4 * three)


@pytest.mark.parametrize(
    ("alpha", "beta", "prefixes"),
    [
        (0.0, 0.0, ("ctx_", "sdpo_", "dpo_")),
        (0.0, 0.5, ("ctx_", "sdpo_")),
        (0.5, 0.0, ("dpo_",)),
    ],
)
def test_a_weight_of_zero_is_the_batch_without_the_channel_to_the_bit(
    model: TinyModel,
    inputs: dict[str, Tensor],
    alpha: float,
    beta: float,
    prefixes: tuple[str, ...],
) -> None:
    """With dropout on: not even a random number is drawn for a channel that is off."""
    model.train()
    without = {key: value for key, value in inputs.items() if not key.startswith(prefixes)}
    seen = []
    for batch, weights in ((inputs, (alpha, beta)), (without, (0.5, 0.5))):
        torch.manual_seed(3)
        out = compose_loss(model, batch, alpha_sdpo=weights[0], beta_replay=weights[1])
        seen.append([out.total.detach(), *gradients(model, out.total)])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_both_weights_zero_is_channel_one_to_the_bit(
    model: TinyModel, inputs: dict[str, Tensor]
) -> None:
    out = compose_loss(model, inputs, alpha_sdpo=0.0, beta_replay=0.0)
    alone = channel_one(model, inputs)
    assert torch.equal(out.total, alone)
    for one, other in zip(gradients(model, out.total), gradients(model, alone), strict=True):
        assert torch.equal(one, other)
    assert out.detached() == {
        "lm_ce": alone.item(),
        "sdpo_jsd": 0.0,
        "trace_replay_dpo": 0.0,
        "total": alone.item(),
    }


def test_a_batch_that_teaches_nothing_has_a_gradient_of_zero(
    model: TinyModel, inputs: dict[str, Tensor]
) -> None:
    out = compose_loss(
        model,
        {
            "input_ids": inputs["input_ids"],
            "response_mask": torch.zeros_like(inputs["response_mask"]),
        },
    )
    out.total.backward()  # type: ignore[no-untyped-call]
    assert out.total.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_defaults_on_a_plain_batch_are_channel_one_in_silence(
    model: TinyModel, inputs: dict[str, Tensor], warnings: pytest.LogCaptureFixture
) -> None:
    plain = {key: inputs[key] for key in ("input_ids", "response_mask")}
    out = compose_loss(model, plain)
    assert torch.equal(out.total, out.lm_ce)
    assert warnings.messages == []
    assert out.channels["sdpo_jsd"].idle == "the batch has no ctx_teacher_input_ids"


@pytest.mark.parametrize(
    ("key", "channel"),
    [
        ("ctx_teacher_input_ids", "sdpo_jsd"),
        ("sdpo_loss_mask", "sdpo_jsd"),
        ("dpo_chosen_input_ids", "trace_replay_dpo"),
        ("dpo_rejected_response_mask", "trace_replay_dpo"),
        ("dpo_chosen_ref_logprobs", "trace_replay_dpo"),
    ],
)
@pytest.mark.parametrize("empty", [False, True])
def test_half_a_channel_is_off_with_one_warning_and_raises_if_strict(
    model: TinyModel,
    inputs: dict[str, Tensor],
    warnings: pytest.LogCaptureFixture,
    key: str,
    channel: str,
    empty: bool,
) -> None:
    whole = compose_loss(model, inputs)
    taken = inputs.pop(key)
    if empty and key != "sdpo_loss_mask":
        inputs[key] = taken[:0]
    for _ in range(2):
        out = compose_loss(model, inputs)
    assert getattr(out, channel).item() == 0
    assert out.active()[channel] == 0
    assert whole.active()[channel] > 0
    assert len(warnings.messages) == 1
    assert f"channel {channel} learns nothing" in warnings.messages[0]
    with pytest.raises(ValueError, match=f"channel {channel} learns nothing"):
        compose_loss(model, inputs, strict=True)


def test_masks_that_mark_nothing_are_told(
    model: TinyModel, inputs: dict[str, Tensor], warnings: pytest.LogCaptureFixture
) -> None:
    for key in ("response_mask", "sdpo_loss_mask", "dpo_rejected_response_mask"):
        inputs[key] = torch.zeros_like(inputs[key])
    out = compose_loss(model, inputs)
    assert out.total.item() == 0
    assert len(warnings.messages) == 3
    assert all(count == 0 for count in out.active().values())


def test_unaligned_sequences_turn_channel_two_off_unless_a_mask_pairs_them(
    model: TinyModel, inputs: dict[str, Tensor], warnings: pytest.LogCaptureFixture
) -> None:
    aligned = compose_loss(model, inputs)
    hint = torch.full((2, 2), 4)
    own = inputs["ctx_teacher_input_ids"]
    inputs["ctx_teacher_input_ids"] = torch.cat([own, hint], 1)
    inputs["sdpo_loss_mask"] = torch.cat([inputs["sdpo_loss_mask"], torch.zeros_like(hint)], 1)
    out = compose_loss(model, inputs)
    assert out.active()["sdpo_jsd"] == 0
    assert "not aligned" in warnings.messages[0]
    inputs["sdpo_student_mask"] = inputs["response_mask"]
    paired = compose_loss(model, inputs, strict=True)
    assert torch.equal(paired.sdpo_jsd, aligned.sdpo_jsd)


def test_taid_needs_no_mask(model: TinyModel, inputs: dict[str, Tensor]) -> None:
    del inputs["sdpo_loss_mask"]
    out = compose_loss(model, inputs, sdpo_wrapper="taid", taid_t=0.4)
    assert out.active()["sdpo_jsd"] == 14


def test_simpo_needs_no_reference(model: TinyModel, inputs: dict[str, Tensor]) -> None:
    with_reference = compose_loss(model, inputs, dpo_variant="simpo")
    for side in ("chosen", "rejected"):
        del inputs[f"dpo_{side}_ref_logprobs"]
    without = compose_loss(model, inputs, dpo_variant="simpo", strict=True)
    assert torch.equal(with_reference.total, without.total)


def test_the_teacher_runs_without_dropout_and_without_gradient(
    model: TinyModel, inputs: dict[str, Tensor]
) -> None:
    model.train()
    compose_loss(model, inputs, beta_replay=0.0)
    assert model.calls == [(True, True), (False, False)]
    assert model.training


def test_attention_masks_are_passed_on(model: TinyModel, inputs: dict[str, Tensor]) -> None:
    """Padding on the left with its masks changes nothing."""
    plain = compose_loss(model, inputs)
    padded = dict(inputs)
    for key, value in inputs.items():
        if value.dim() == 2:
            padded[key] = F.pad(value, (3, 0))
    for prefix in ("", "ctx_teacher_", "dpo_chosen_", "dpo_rejected_"):
        ones = torch.ones_like(inputs[f"{prefix}input_ids"])
        padded[f"{prefix}attention_mask"] = F.pad(ones, (3, 0))
    torch.testing.assert_close(compose_loss(model, padded).total, plain.total)


@pytest.mark.parametrize("key", ["input_ids", "response_mask"])
def test_a_missing_required_key_is_named(
    model: TinyModel, inputs: dict[str, Tensor], key: str
) -> None:
    del inputs[key]
    with pytest.raises(ValueError, match=f"the batch has no {key}"):
        compose_loss(model, inputs)


@pytest.mark.parametrize(
    "key",
    [
        "response_mask",
        "sdpo_loss_mask",
        "dpo_chosen_response_mask",
        "dpo_rejected_response_mask",
    ],
)
def test_a_mask_of_another_shape_is_refused_by_name(
    model: TinyModel, inputs: dict[str, Tensor], key: str
) -> None:
    inputs[key] = inputs[key][:, 1:]
    with pytest.raises(ValueError, match=f"{key} has shape"):
        compose_loss(model, inputs)


@pytest.mark.parametrize(
    "key",
    ["response_mask", "sdpo_loss_mask", "dpo_chosen_response_mask", "dpo_rejected_response_mask"],
)
def test_a_mask_given_as_labels_is_refused_by_name(
    model: TinyModel, inputs: dict[str, Tensor], key: str
) -> None:
    inputs[key] = torch.where(inputs[key] == 0, -100, 5)
    with pytest.raises(ValueError, match=f"{key} is not a mask of 0 and 1"):
        compose_loss(model, inputs)
    inputs[key] = torch.where(inputs[key] == 5, 1, -100)
    with pytest.raises(ValueError, match=f"{key} is not a mask of 0 and 1"):
        compose_loss(model, inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dpo_variant": "orpo"}, "dpo_variant is 'orpo'"),
        ({"sdpo_wrapper": "opd"}, "sdpo_wrapper is 'opd'"),
        ({"sdpo_wrapper": "taid"}, "needs taid_t"),
        ({"sdpo_wrapper": "taid", "taid_t": 1.5}, "t is 1.5"),
        ({"sdpo_wrapper": "taid", "taid_t": -0.1}, "t is -0.1"),
        ({"alpha_sdpo": -1.0}, "alpha_sdpo is -1.0"),
        ({"beta_replay": float("nan")}, "beta_replay is nan"),
        ({"alpha_sdpo": float("inf")}, "alpha_sdpo is inf"),
        ({"taid_t": 0.5}, "taid_t is 0.5"),
        ({"simpo_gamma": float("nan")}, "simpo_gamma is nan"),
        ({"lm_ce_label_smoothing": 2.0}, "lm_ce_label_smoothing is 2.0"),
        ({"sdpo_temperature": 0.0}, "temperature is 0.0"),
    ],
)
def test_options_that_cannot_be_are_refused(
    model: TinyModel, inputs: dict[str, Tensor], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compose_loss(model, inputs, **options)


def test_components_are_four_scalars() -> None:
    parts = [torch.tensor(float(n), requires_grad=True) for n in range(4)]
    found = LossComponents(*parts).detached()
    assert found == {"lm_ce": 0.0, "sdpo_jsd": 1.0, "trace_replay_dpo": 2.0, "total": 3.0}
    assert all(type(value) is float for value in found.values())
