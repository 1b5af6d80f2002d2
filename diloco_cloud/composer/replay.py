"""Channel 3's data: preference pairs, their reference log-probabilities, and who draws which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from diloco_cloud.composer.encoding import PromptEncoder
from diloco_cloud.composer.preference_pairs import EncodedPair, PairSet, PairStream, pair_tensors
from diloco_cloud.composer.reference import PairLogprobs, ReferenceLogprobs

#: From the replay channel's tensors to the log-probability of each chosen and rejected response.
Scorer: TypeAlias = Callable[[dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]


class Replay:
    """A stream of preference pairs beside the rollouts.

    Args:
        rows: see :meth:`PairSet.encode`.
        encoder: of the rollouts' prompts.
        max_length: tokens of prompt and response together.
        batch_size: pairs of a process in a micro-batch.
        seed: of their order.
        needs_reference: whether batches carry the reference's log-probabilities.
        process: of ``processes`` that draw from the same pairs.
        processes: in all.

    Attributes:
        pairs: what is drawn from.
        reference: what the reference policy makes of them; empty where none is needed.

    Raises:
        ConfigError: a pair is malformed, or none is usable.
    """

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        encoder: PromptEncoder,
        *,
        max_length: int,
        batch_size: int,
        seed: int,
        needs_reference: bool,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self.pairs = PairSet.encode(rows, encoder, max_length=max_length)
        self.reference = ReferenceLogprobs()
        self.needs_reference = needs_reference
        self._batch_size = batch_size
        padding: Any = encoder.tokenizer.pad_token_id
        self._pad_token_id: int = padding
        self._stream = PairStream(
            len(self.pairs.pairs), batch_size, seed=seed, process=process, processes=processes
        )

    def complete_reference(self, score: Scorer, device: torch.device) -> None:
        """Compute what is missing of the reference; ``score`` runs the reference policy."""

        def score_pairs(pairs: Sequence[EncodedPair]) -> list[PairLogprobs]:
            chosen, rejected = score(self._tensors(pairs, None, device))
            return list(zip(chosen.tolist(), rejected.tolist(), strict=True))

        if self.needs_reference:
            self.reference.compute(self.pairs.pairs, score_pairs, batch_size=self._batch_size)

    def batch(self, number: int, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of a micro-batch.

        Args:
            number: of the micro-batch, from the beginning of training.
            device: of the tensors.
        """
        pairs = [self.pairs.pairs[index] for index in self._stream.draw(number)]
        reference = self.reference.of(pairs) if self.needs_reference else None
        return self._tensors(pairs, reference, device)

    def _tensors(
        self,
        pairs: Sequence[EncodedPair],
        reference: Sequence[PairLogprobs] | None,
        device: torch.device,
    ) -> dict[str, torch.Tensor]:
        return pair_tensors(pairs, reference, pad_token_id=self._pad_token_id, device=device)
