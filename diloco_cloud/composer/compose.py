"""The verification harness: the three channels' loss of one batch, with any causal model.

Needs no trainer and no trl. The channels' mathematics is the trainer's own (:mod:`channels`);
only channel 1 differs, a cross-entropy standing in for the rollouts' policy gradient.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diloco_cloud.composer.channels import (
    ChannelLoss,
    DPOVariant,
    EntropyMode,
    ReplayOptions,
    SDPOOptions,
    SDPOWrapper,
    idle,
    replay_loss,
    sdpo_loss,
)
from diloco_cloud.composer.evaluation_mode import evaluation_mode
from diloco_cloud.composer.losses.checks import (
    channel_weight,
    require,
    same_shape,
    token_mask,
    unit_interval,
)
from diloco_cloud.composer.losses.logprobs import response_logprobs
from diloco_cloud.composer.losses.rowwise import working_dtype
from diloco_cloud.errors import ConfigError

logger = logging.getLogger(__name__)

_SDPO = "sdpo_jsd"
_REPLAY = "trace_replay_dpo"
_IGNORED = -100
#: What was warned of already, once per process.
_warned: set[tuple[str, str]] = set()


@dataclass
class LossComponents:
    """The channels of one loss.

    Attributes:
        lm_ce: scalar, channel 1.
        sdpo_jsd: scalar, channel 2 before its weight.
        trace_replay_dpo: scalar, channel 3 before its weight.
        total: scalar, ``lm_ce + alpha_sdpo * sdpo_jsd + beta_replay * trace_replay_dpo``.
        channels: what each channel did, by the name of its field: how many tokens or pairs it
            learnt from, and why none.
    """

    lm_ce: Tensor
    sdpo_jsd: Tensor
    trace_replay_dpo: Tensor
    total: Tensor
    channels: Mapping[str, ChannelLoss] = field(default_factory=dict, repr=False, compare=False)

    def detached(self) -> dict[str, float]:
        """The four losses as plain numbers, for a log."""
        names = ("lm_ce", _SDPO, _REPLAY, "total")
        return {name: float(getattr(self, name).detach()) for name in names}

    def active(self) -> dict[str, int]:
        """How many tokens (channels 1 and 2) or pairs (channel 3) each channel learnt from."""
        return {name: channel.active for name, channel in self.channels.items()}


def compose_loss(
    model: torch.nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    alpha_sdpo: float = 0.1,
    beta_replay: float = 0.05,
    sdpo_jsd_beta: float = 0.5,
    sdpo_temperature: float = 1.0,
    sdpo_token_clip: float | None = None,
    replay_dpo_beta: float = 0.1,
    lm_ce_label_smoothing: float = 0.0,
    dpo_variant: DPOVariant = "dpo",
    sdpo_wrapper: SDPOWrapper = "none",
    taid_t: float | None = None,
    simpo_beta: float = 2.0,
    simpo_gamma: float = 1.0,
    entropy_opd_h_max: float | None = None,
    entropy_opd_mode: EntropyMode = "soft",
    strict: bool = False,
) -> LossComponents:
    """``lm_ce + alpha_sdpo * sdpo_jsd + beta_replay * trace_replay_dpo`` of one batch.

    A channel is off where its weight is 0: the model is not run for it, and the total is the same
    to the bit as without its inputs. It is off too where its inputs are missing, empty or cannot
    be used. That is silent where the batch has nothing for it; where the batch has some of it,
    it is warned of once. ``components.channels`` holds the reason either way. ``strict`` raises
    instead, for any channel whose weight is above 0.

    ``inputs`` (masks are of 0 and 1; sequences are padded on the right, or come with the mask of
    the same prefix ending in ``attention_mask``):

    - always: ``input_ids`` and ``response_mask`` (B, T_s);
    - channel 2: ``ctx_teacher_input_ids`` and ``sdpo_loss_mask`` (B, T_t), the mask on the tokens
      that the teacher judges. They are at the same positions of ``input_ids``, which needs
      T_t = T_s, or ``sdpo_student_mask`` (B, T_s) says where they are. TAID without a mask takes
      every token;
    - channel 3: ``dpo_chosen_input_ids`` and ``dpo_chosen_response_mask`` (P, T_c), the same of
      ``dpo_rejected`` (P, T_r), and for DPO ``dpo_chosen_ref_logprobs`` and
      ``dpo_rejected_ref_logprobs`` (P,). SimPO ignores the last two.

    Args:
        model: a causal language model: takes ``input_ids``, returns an object with ``logits``.
        inputs: see above.
        alpha_sdpo: weight of channel 2.
        beta_replay: weight of channel 3.
        sdpo_jsd_beta: 0 forward KL, 0.5 JSD, 1 reverse KL. Not for a wrapper.
        sdpo_temperature: of both softmaxes in channel 2. Not for TAID.
        sdpo_token_clip: the most one token adds to channel 2, in nats.
        replay_dpo_beta: DPO's β.
        lm_ce_label_smoothing: of channel 1.
        dpo_variant: ``"dpo"`` or ``"simpo"``.
        sdpo_wrapper: ``"none"``, ``"taid"`` or ``"entropy_opd"``.
        taid_t: in [0, 1]; required by ``"taid"``, and for nothing else.
        simpo_beta: SimPO's scale.
        simpo_gamma: SimPO's margin.
        entropy_opd_h_max: nats at which the soft gate is open; None for log V.
        entropy_opd_mode: ``"soft"`` or ``"paper"``.
        strict: raise where a channel with a weight learns nothing.

    Raises:
        ConfigError: (a ``ValueError``) an option out of its range, a required key missing, shapes
            that do not fit, a mask of other values than 0 and 1, or, if ``strict``, an idle
            channel.
    """
    for name, weight in (("alpha_sdpo", alpha_sdpo), ("beta_replay", beta_replay)):
        channel_weight(weight, name)
    unit_interval(lm_ce_label_smoothing, "lm_ce_label_smoothing")
    distillation = SDPOOptions(
        jsd_beta=sdpo_jsd_beta,
        temperature=sdpo_temperature,
        token_clip=sdpo_token_clip,
        wrapper=sdpo_wrapper,
        taid_t=taid_t,
        entropy_opd_h_max=entropy_opd_h_max,
        entropy_opd_mode=entropy_opd_mode,
    )
    preference = ReplayOptions(
        variant=dpo_variant,
        dpo_beta=replay_dpo_beta,
        simpo_beta=simpo_beta,
        simpo_gamma=simpo_gamma,
    )
    logits, first = _language_modelling(model, inputs, lm_ce_label_smoothing)
    second, third = idle("its weight is 0", like=logits), idle("its weight is 0", like=logits)
    if alpha_sdpo > 0:
        second = _distillation(model, inputs, logits, distillation)
    if beta_replay > 0:
        third = _preference(model, inputs, logits, preference)
    channels = {"lm_ce": first, _SDPO: second, _REPLAY: third}
    _tell_idle(channels, {_SDPO: alpha_sdpo, _REPLAY: beta_replay}, inputs, strict=strict)
    # A channel that is off adds nothing, not even a zero: the total is channel 1 to the bit.
    total = first.loss
    if second.idle is None:
        total = total + alpha_sdpo * second.loss
    if third.idle is None:
        total = total + beta_replay * third.loss
    return LossComponents(first.loss, second.loss, third.loss, total, channels)


def _language_modelling(
    model: torch.nn.Module, inputs: Mapping[str, Tensor], label_smoothing: float
) -> tuple[Tensor, ChannelLoss]:
    missing = [key for key in ("input_ids", "response_mask") if key not in inputs]
    require(
        not missing,
        f"the batch has no {' and no '.join(missing)}",
        fix="Every batch needs input_ids and response_mask, both (B, T).",
    )
    ids, mask = inputs["input_ids"], inputs["response_mask"]
    token_mask(mask, ids, "response_mask")
    logits = _logits(model, inputs, "")
    labels = ids[:, 1:].masked_fill(mask[:, 1:] == 0, _IGNORED)
    tokens = int((labels != _IGNORED).sum())
    if tokens == 0:
        return logits, idle("response_mask marks no token", like=logits)
    loss = F.cross_entropy(
        logits[:, :-1].reshape(-1, logits.size(-1)).to(working_dtype(logits)),
        labels.reshape(-1),
        ignore_index=_IGNORED,
        label_smoothing=label_smoothing,
    )
    return logits, ChannelLoss(loss, active=tokens, tokens=tokens)


def _distillation(
    model: torch.nn.Module, inputs: Mapping[str, Tensor], logits: Tensor, options: SDPOOptions
) -> ChannelLoss:
    ids, mask = inputs.get("ctx_teacher_input_ids"), inputs.get("sdpo_loss_mask")
    if ids is None or ids.numel() == 0:
        return idle("the batch has no ctx_teacher_input_ids", like=logits)
    if mask is None and options.wrapper != "taid":
        return idle("the batch has no sdpo_loss_mask", like=logits)
    mask = torch.ones_like(ids) if mask is None else mask
    token_mask(mask, ids, "sdpo_loss_mask")
    student_mask = inputs.get("sdpo_student_mask")
    if student_mask is None and ids.shape != inputs["input_ids"].shape:
        return idle(
            f"ctx_teacher_input_ids {tuple(ids.shape)} and input_ids "
            f"{tuple(inputs['input_ids'].shape)} are not aligned, and there is no "
            "sdpo_student_mask",
            like=logits,
        )
    if student_mask is not None:
        token_mask(student_mask, inputs["input_ids"], "sdpo_student_mask")
    # A token's distribution is the one before it.
    return sdpo_loss(
        logits[:, :-1],
        _teacher_logits(model, inputs)[:, :-1],
        mask[:, 1:],
        options,
        student_mask=None if student_mask is None else student_mask[:, 1:],
    )


@torch.no_grad()
def _teacher_logits(model: torch.nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """With dropout off: what the teacher says must not depend on chance."""
    with evaluation_mode(model):
        return _logits(model, inputs, "ctx_teacher_")


def _preference(
    model: torch.nn.Module, inputs: Mapping[str, Tensor], logits: Tensor, options: ReplayOptions
) -> ChannelLoss:
    needed = [
        f"dpo_{s}_{k}" for s in ("chosen", "rejected") for k in ("input_ids", "response_mask")
    ]
    references = ["dpo_chosen_ref_logprobs", "dpo_rejected_ref_logprobs"]
    needed += references if options.variant == "dpo" else []
    missing = [key for key in needed if key not in inputs or inputs[key].numel() == 0]
    if missing:
        return idle(f"the batch has no {', no '.join(missing)}", like=logits)
    chosen = _response_logprobs(model, inputs, "dpo_chosen_")
    rejected = _response_logprobs(model, inputs, "dpo_rejected_")
    ref_chosen, ref_rejected = (inputs.get(key) for key in references)
    return replay_loss(
        *chosen,
        *rejected,
        options,
        ref_chosen_logprobs=ref_chosen,
        ref_rejected_logprobs=ref_rejected,
    )


def _response_logprobs(
    model: torch.nn.Module, inputs: Mapping[str, Tensor], prefix: str
) -> tuple[Tensor, Tensor]:
    ids, mask = inputs[f"{prefix}input_ids"], inputs[f"{prefix}response_mask"]
    token_mask(mask, ids, f"{prefix}response_mask")
    return response_logprobs(_logits(model, inputs, prefix), ids, mask)


def _logits(model: torch.nn.Module, inputs: Mapping[str, Tensor], prefix: str) -> Tensor:
    arguments: dict[str, Any] = {"input_ids": inputs[f"{prefix}input_ids"]}
    if (attention := inputs.get(f"{prefix}attention_mask")) is not None:
        same_shape(attention, arguments["input_ids"], f"{prefix}attention_mask")
        arguments["attention_mask"] = attention
    logits: Tensor = model(**arguments).logits
    return logits


def _tell_idle(
    channels: Mapping[str, ChannelLoss],
    weights: Mapping[str, float],
    inputs: Mapping[str, Tensor],
    *,
    strict: bool,
) -> None:
    offered = {
        "lm_ce": True,
        _SDPO: any(key.startswith(("ctx_teacher_", "sdpo_")) for key in inputs),
        _REPLAY: any(key.startswith("dpo_") for key in inputs),
    }
    for name, channel in channels.items():
        if channel.idle is None or weights.get(name) == 0:
            continue
        if strict:
            raise ConfigError(
                f"channel {name} learns nothing: {channel.idle}",
                fix="Give the batch what the channel needs, or set its weight to 0.",
            )
        # Lengths differ from batch to batch; what is wrong does not.
        kind = (name, re.sub(r"\d+", "#", channel.idle))
        if offered[name] and kind not in _warned:
            _warned.add(kind)
            logger.warning("channel %s learns nothing: %s", name, channel.idle)
