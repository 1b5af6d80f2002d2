"""Whether a model's logits are its output head's alone, and what the head is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

#: What configurations call a cap or a scale behind the head, by transformers 5.
_AFTER_THE_HEAD = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_mup_width_multiplier",
    "logits_scaling",
    "logits_soft_cap",
    "lm_head_multiplier",
    "output_logit_soft_cap",
    "output_multiplier",
)
#: Greatest logit of the numeric check: any cap that matters shows there, and fp16 can hold it.
_LOUD = 1000.0


class OutputHead:
    """Reads what the head of a model is given, in place of its logits (B, T, V).

    Args:
        bare: the model without adapters and without a distributed wrapper.

    Attributes:
        linear: the head.
        unusable: why the head cannot stand for the logits, in a few words; None if it can.
    """

    def __init__(self, bare: nn.Module) -> None:
        find_head: Any = getattr(bare, "get_output_embeddings", lambda: None)
        head = find_head()
        self.linear: Any = head
        self.unusable = None if type(head) is nn.Linear else "the output head is no plain Linear"
        config: Any = getattr(bare, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        changed = [n for n in _AFTER_THE_HEAD if getattr(config, n, None) not in (None, 0, 1)]
        if changed:
            self.unusable = f"the model's {changed[0]} changes them behind the output head"
        self._is_checked = False
        self._input: torch.Tensor | None = None
        self._expected: torch.Tensor | None = None
        self._autocast: tuple[bool, torch.dtype] | None = None

    def states(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor | None:
        """The head's input, (B, T, H), of a call whose logits nobody needs.

        The head projects one position only. The first call checks that the logits are the head's
        output as it is, in the precision the model computes in; where they are not,
        :attr:`unusable` says so from then on.

        Args:
            model: to call; may be wrapped.
            inputs: of the call, with a cache left out.

        Returns:
            None where the head is unusable.
        """
        if not self._is_checked and self._is_compiled(model):
            self.unusable = "a compiled model may not notice that its head is read"
            return None
        handle = self.linear.register_forward_pre_hook(self._take)
        try:
            logits: torch.Tensor = model(**inputs, use_cache=False).logits
        finally:
            handle.remove()
        states, self._input = self._input, None
        if states is None:
            self.unusable = "the model does not call its output head"
        elif not self._is_checked:
            self._check(logits)
        return None if self.unusable else states

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Autocast as it was where the model called its head: accelerate's ends with the call."""
        enabled, dtype = self._autocast or (False, torch.bfloat16)
        with torch.autocast(self.linear.weight.device.type, dtype=dtype, enabled=enabled):
            yield

    def _take(self, _: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        (states,) = arguments
        kind = states.device.type
        self._input = states
        self._autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        last = states[:, -1:]
        if not self._is_checked:
            with torch.no_grad():
                quiet = self._project(last).abs().amax().clamp(min=0.1)
                last = last * (_LOUD / quiet).to(last.dtype)
                self._expected = self._project(last)
        return (last,)

    def _is_compiled(self, model: nn.Module) -> bool:
        """Whether torch.compile has taken the head in: it does not guard on hooks."""
        return any(
            (hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None)
            and any(inner is self.linear for inner in part.modules())
            for part in model.modules()
        )

    def _project(self, states: torch.Tensor) -> torch.Tensor:
        return F.linear(states, self.linear.weight, self.linear.bias)

    @torch.no_grad()
    def _check(self, logits: torch.Tensor) -> None:
        assert self._expected is not None
        self._is_checked, expected, self._expected = True, self._expected, None
        # The same product of the same numbers: only the order of its sum may differ.
        tolerance = 1e-4 if torch.finfo(expected.dtype).bits >= 32 else 1e-2
        same = logits.shape == expected.shape and torch.allclose(
            logits.float(), expected.float(), rtol=tolerance, atol=tolerance
        )
        if not same:
            self.unusable = "the model changes them behind the output head"
