"""Turns after different contexts, laid out so that their tokens line up.

The student saw the prompt, the teacher saw the hint too: the contexts differ in length, the turn is
the same. Both are padded on the left, so that the turn's tokens stand in the same last columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Turns:
    """A batch of contexts, each with the turn that follows it.

    Attributes:
        input_ids: (B, T), padded on the left.
        attention_mask: (B, T), 0 on padding.
        turn_mask: (B, L): which of the last L columns are the turn's.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    turn_mask: torch.Tensor

    @classmethod
    def flush_right(
        cls, contexts: Sequence[torch.Tensor], turns: Sequence[torch.Tensor], pad_token_id: int
    ) -> Turns:
        """Lay out one row for each context (1-D ids, not empty) and its turn (1-D ids)."""
        length = max(len(c) + len(t) for c, t in zip(contexts, turns, strict=True))
        width = max(1, *map(len, turns))
        ids = contexts[0].new_full((len(turns), length), pad_token_id)
        mask = torch.zeros_like(ids)
        turn_mask = ids.new_zeros((len(turns), width))
        for row, (context, turn) in enumerate(zip(contexts, turns, strict=True)):
            both = torch.cat([context, turn])
            ids[row, length - len(both) :] = both
            mask[row, length - len(both) :] = 1
            turn_mask[row, width - len(turn) :] = 1
        return cls(ids, mask, turn_mask)

    @property
    def columns(self) -> int:
        """L, the length of the longest turn."""
        return self.turn_mask.size(1)
