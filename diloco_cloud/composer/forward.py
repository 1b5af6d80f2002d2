"""The model's forward passes for channels 2 and 3, with as little of (B, T, V) as it allows."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from diloco_cloud.composer.channels import (
    ChannelLoss,
    ReplayOptions,
    SDPOOptions,
    replay_loss,
    sdpo_loss,
    sdpo_loss_from_hidden,
)
from diloco_cloud.composer.evaluation_mode import evaluation_mode
from diloco_cloud.composer.losses.checks import has_keys, token_mask
from diloco_cloud.composer.losses.logprobs import token_logprobs
from diloco_cloud.composer.output_head import OutputHead
from diloco_cloud.composer.turns import Turns

logger = logging.getLogger(__name__)


class ChannelForward:
    """Runs a causal language model the way its ``forward`` allows.

    Args:
        bare: the model without adapters and without a distributed wrapper, which hide its
            signature and its output head.
        may_use_head: whether the output head's weight can be read as it is: not where it is
            sharded, or computes in another precision than the rest.
    """

    def __init__(self, bare: nn.Module, *, may_use_head: bool = True) -> None:
        accepted = inspect.signature(bare.forward).parameters
        self._keeps_few = "logits_to_keep" in accepted
        self._takes_positions = "position_ids" in accepted
        self._head = OutputHead(bare)
        if not may_use_head:
            self._head.unusable = "the output head is sharded, or has a precision of its own"
        self._has_warned = False

    @property
    def uses_head(self) -> bool:
        """Whether channel 2 runs from hidden states, without logits (B, L, V)."""
        return self._head.unusable is None

    def distill(
        self,
        model: nn.Module,
        student: Turns,
        teacher: Turns,
        options: SDPOOptions,
        *,
        num_items: float | torch.Tensor | None = None,
    ) -> ChannelLoss:
        """Channel 2: ``model`` after the student's contexts against itself after the teacher's.

        Args:
            model: to call; may be wrapped. The teacher's pass is in evaluation mode, without
                gradient.
            student: turns after the contexts they were written in.
            teacher: the same turns in the same rows, after the hinted contexts.
            options: of the loss.
            num_items: what the sum over tokens is divided by; by default their number.
        """
        mask = student.turn_mask
        with torch.no_grad(), evaluation_mode(model):
            teacher_states = self._states(model, teacher)
        student_states = self._states(model, student)
        if not self.uses_head:
            return sdpo_loss(student_states, teacher_states, mask, options, num_items=num_items)
        with self._head.precision():
            return sdpo_loss_from_hidden(
                student_states,
                teacher_states,
                self._head.linear,
                mask,
                options,
                num_items=num_items,
            )

    def replay(
        self, model: nn.Module, pairs: Mapping[str, torch.Tensor], options: ReplayOptions
    ) -> ChannelLoss:
        """Channel 3: both responses of each pair, in one pass.

        Args:
            model: to call; may be wrapped.
            pairs: the tensors of :func:`~diloco_cloud.composer.preference_pairs.pair_tensors`.
            options: of the loss.

        Raises:
            ConfigError: a tensor is missing, or a mask is not of its tokens' shape.
        """
        sides = ("chosen", "rejected")
        for side in sides:
            names = f"dpo_{side}_input_ids", f"dpo_{side}_response_mask"
            has_keys(pairs, *names)
            token_mask(pairs[names[1]], pairs[names[0]], names[1])
        ids = torch.cat([pairs[f"dpo_{side}_input_ids"] for side in sides])
        mask = torch.cat([pairs[f"dpo_{side}_response_mask"] for side in sides])
        logprobs, mask = self.response_logprobs(model, ids, mask)
        (chosen, rejected), (chosen_mask, rejected_mask) = logprobs.chunk(2), mask.chunk(2)
        return replay_loss(
            chosen,
            chosen_mask,
            rejected,
            rejected_mask,
            options,
            ref_chosen_logprobs=pairs.get("dpo_chosen_ref_logprobs"),
            ref_rejected_logprobs=pairs.get("dpo_rejected_ref_logprobs"),
        )

    def response_logprobs(
        self, model: nn.Module, input_ids: torch.Tensor, response_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of response tokens, for sequences padded on the right.

        Args:
            model: to call; may be wrapped.
            input_ids: (N, T).
            response_mask: (N, T), 0 in the first column.

        Returns:
            (N, L) log-probabilities of the last L tokens, where L reaches back to the first
            response token of all rows, and their part of the mask.
        """
        marked = response_mask.any(dim=0)
        first = int(marked.int().argmax()) if marked.any() else input_ids.size(1) - 1
        columns = input_ids.size(1) - first
        # Nothing attends to what is behind it, so padding on the right needs no mask.
        logits = self._last(model, {"input_ids": input_ids}, columns)
        mask = response_mask[:, first:]
        return token_logprobs(logits, input_ids[:, first:], mask), mask

    def _states(self, model: nn.Module, turns: Turns) -> torch.Tensor:
        """What predicts the last columns: hidden states (B, L, H) where the head can be applied
        later, else logits (B, L, V)."""
        inputs: dict[str, Any] = {
            "input_ids": turns.input_ids,
            "attention_mask": turns.attention_mask,
        }
        if self._takes_positions:
            # Else a model with absolute positions counts the padding.
            inputs["position_ids"] = (turns.attention_mask.cumsum(-1) - 1).clamp(min=0)
        if self.uses_head:
            states = self._head.states(model, self._few(inputs, turns.columns))
            if states is not None:
                return states[:, -turns.columns - 1 : -1]
        self._warn()
        return self._last(model, inputs, turns.columns)

    def _few(self, inputs: dict[str, Any], columns: int) -> dict[str, Any]:
        """``inputs`` of a call that gives what predicts the last tokens, and one column more."""
        return {**inputs, "logits_to_keep": columns + 1} if self._keeps_few else inputs

    def _last(self, model: nn.Module, inputs: dict[str, Any], columns: int) -> torch.Tensor:
        """Logits that predict the last ``columns`` tokens, (B, columns, V)."""
        logits: torch.Tensor = model(**self._few(inputs, columns), use_cache=False).logits
        return logits[:, -columns - 1 : -1]

    def _warn(self) -> None:
        if not self._has_warned:
            logger.warning("channel 2 materialises logits: %s", self._head.unusable)
            self._has_warned = True
