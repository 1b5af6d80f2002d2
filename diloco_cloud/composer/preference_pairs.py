"""Preference pairs of the replay channel: checked and encoded once, then drawn by position."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import torch

from diloco_cloud.composer.collator import CollatorConfig, ComposerDataCollator
from diloco_cloud.composer.data_set_rows import without_none
from diloco_cloud.composer.encoding import PromptEncoder, RenderingTokenizer, require_template
from diloco_cloud.composer.trace import check_pair
from diloco_cloud.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncodedPair:
    """Token ids of one pair; both responses follow the same prompt."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Names the pair's content, whatever its place in the data."""
        hashed = blake2b(digest_size=16)
        for ids in (self.prompt, self.chosen, self.rejected):
            hashed.update(f"{len(ids)}:{','.join(map(str, ids))};".encode())
        return hashed.hexdigest()


@dataclass(frozen=True)
class PairSet:
    """Pairs a replica trains on.

    Attributes:
        pairs: at least one.
        skipped: pairs that can teach nothing, by reason.
    """

    pairs: tuple[EncodedPair, ...]
    skipped: Mapping[str, int]

    @classmethod
    def encode(
        cls, rows: Iterable[Mapping[str, Any]], encoder: PromptEncoder, *, max_length: int
    ) -> PairSet:
        """Encode ``rows``: ``state_messages`` (or ``prompt``), ``chosen`` and ``rejected``.

        A prompt that is too long loses its oldest turns, or its beginning if it is text. A pair is
        skipped, and counted, where both responses are the same, the prompt is empty, or a response
        leaves no room for any prompt.

        Args:
            rows: mappings; a prompt is a conversation or plain text, a response is text or a list
                of one assistant message.
            encoder: of the rollouts' prompts: a pair's prompt is written like theirs.
            max_length: tokens of prompt and response together.

        Raises:
            ConfigError: a row is no mapping, a key is missing or of a wrong type, a response is
                empty, or no pair is usable.
        """
        pairs: list[EncodedPair] = []
        skipped: Counter[str] = Counter()
        pair_encoder = _Encoder(encoder, max_length)
        index = -1
        for index, row in enumerate(rows):
            pair = pair_encoder.encode(_read(row, index))
            if isinstance(pair, str):
                skipped[pair] += 1
            else:
                pairs.append(pair)
        if not pairs:
            found = ", ".join(f"{why}: {n}" for why, n in skipped.items()) or "none given"
            raise ConfigError(
                f"no preference pair is usable ({found}), so the replay channel cannot fire",
                fix="Give dpo_pairs with two different responses that fit max_dpo_seq_len, or set "
                "beta_replay=0.",
            )
        if skipped:
            logger.warning(
                "%d of %d pairs are skipped: %s", skipped.total(), index + 1, dict(skipped)
            )
        return cls(tuple(pairs), dict(skipped))


class PairStream:
    """Which pairs go into which micro-batch: a function of its number, so restarts continue it.

    Args:
        pairs: number of pairs.
        batch_size: pairs of one process in one micro-batch.
        seed: of the order, which is another one in each pass over the pairs.
        process: of ``processes`` that draw from the same pairs.
    """

    def __init__(
        self, pairs: int, batch_size: int, *, seed: int, process: int = 0, processes: int = 1
    ) -> None:
        self._pairs, self._batch_size = pairs, batch_size
        self._process, self._processes = process, processes
        # Two: a micro-batch can reach from one pass into the next.
        self._order = lru_cache(maxsize=2)(lambda epoch: _permutation(pairs, seed, epoch))

    def draw(self, micro_step: int) -> list[int]:
        """Indices of the pairs of micro-batch ``micro_step``, counted from 0 over the whole run."""
        first = (micro_step * self._processes + self._process) * self._batch_size
        places = (divmod(first + i, self._pairs) for i in range(self._batch_size))
        return [self._order(epoch)[place] for epoch, place in places]


def pair_tensors(
    pairs: Sequence[EncodedPair],
    reference: Sequence[tuple[float, float]] | None,
    *,
    pad_token_id: int,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """The replay channel's inputs: ids and response masks (B, T), padded on the right.

    Args:
        pairs: of one micro-batch.
        reference: of each pair, the reference policy's log-probability of the chosen and of the
            rejected response; None where the loss needs none.
        pad_token_id: fills the rows up.
        device: of the tensors.

    Returns:
        ``dpo_{chosen,rejected}_{input_ids,response_mask}`` and, with ``reference``,
        ``dpo_{chosen,rejected}_ref_logprobs`` of shape (B,).
    """
    tensors: dict[str, torch.Tensor] = {}
    # One length for both sides, so that one forward pass takes them all.
    length = max(len(p.prompt) + max(len(p.chosen), len(p.rejected)) for p in pairs)
    for index, side in enumerate(("chosen", "rejected")):
        ids = torch.full((len(pairs), length), pad_token_id, dtype=torch.long)
        mask = torch.zeros((len(pairs), length), dtype=torch.long)
        for row, pair in enumerate(pairs):
            response: tuple[int, ...] = getattr(pair, side)
            end = len(pair.prompt) + len(response)
            ids[row, :end] = torch.tensor(pair.prompt + response)
            mask[row, len(pair.prompt) : end] = 1
        tensors[f"dpo_{side}_input_ids"] = ids.to(device)
        tensors[f"dpo_{side}_response_mask"] = mask.to(device)
        if reference is not None:
            tensors[f"dpo_{side}_ref_logprobs"] = torch.tensor(
                [one[index] for one in reference], dtype=torch.float32, device=device
            )
    return tensors


class _Encoder:
    """Turns pairs into ids."""

    def __init__(self, encoder: PromptEncoder, max_length: int) -> None:
        self._encoder, self._max_length = encoder, max_length
        self._tokenizer: Any = encoder.tokenizer
        self._collator: ComposerDataCollator | None = None

    def encode(self, row: Mapping[str, Any]) -> EncodedPair | str:
        """The pair, or why it is skipped."""
        if isinstance(row["state_messages"], str):
            return self._plain(row["state_messages"], row["chosen"], row["rejected"])
        if self._collator is None:
            require_template(self._tokenizer, self._encoder.chat_template)
            options = CollatorConfig(max_dpo_seq_len=self._max_length)
            self._collator = ComposerDataCollator(RenderingTokenizer(self._encoder), options)
        before = Counter(self._collator.skipped)
        tensors = self._collator.pairs([row])
        if not tensors:
            return next(iter(Counter(self._collator.skipped) - before))
        (prompt, chosen), (_, rejected) = (
            _halves(tensors[f"dpo_{side}_input_ids"][0], tensors[f"dpo_{side}_response_mask"][0])
            for side in ("chosen", "rejected")
        )
        return EncodedPair(prompt, chosen, rejected)

    def _plain(self, prompt: str, *responses: str) -> EncodedPair | str:
        end = self._tokenizer.eos_token_id
        chosen, rejected = (
            (*self._tokenizer(response, add_special_tokens=False)["input_ids"], end)
            for response in responses
        )
        if chosen == rejected:
            return "pair_without_difference"
        room = self._max_length - max(len(chosen), len(rejected))
        if room < 1:
            return "pair_too_long"
        ids = tuple(self._tokenizer(prompt)["input_ids"][-room:])
        # Without a token ahead of it, nothing predicts a response's first one.
        return EncodedPair(ids, chosen, rejected) if ids else "pair_without_prompt"


def _halves(ids: torch.Tensor, mask: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A prompt's ids and a response's; there is no padding where a row is alone."""
    start = int(mask.argmax())
    return tuple(ids[:start].tolist()), tuple(ids[start:].tolist())


def _read(row: Any, index: int) -> dict[str, Any]:
    """A pair in the documented form; TRL's preference rows are understood."""
    where = f"preference pair {index}"
    if not isinstance(row, Mapping):
        raise ConfigError(
            f"{where} is {type(row).__name__} {row!r:.40}, not an object",
            fix="Give each pair as state_messages (or prompt), chosen and rejected.",
        )
    pair = dict(row)
    if pair.get("state_messages") is None and pair.get("prompt") is not None:
        pair["state_messages"] = pair["prompt"]
    for side in ("chosen", "rejected"):
        found = pair.get(side)
        if isinstance(found, list | tuple) and len(found) == 1 and isinstance(found[0], Mapping):
            pair[side] = found[0].get("content")
    if isinstance(pair.get("state_messages"), str):
        # What is checked of a conversation is true of plain text.
        check_pair({**pair, "state_messages": [{"role": "user", "content": "-"}]}, where)
    else:
        check_pair(pair, where)
        pair["state_messages"] = without_none(pair["state_messages"])
    return pair


def _permutation(length: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order: list[int] = torch.randperm(length, generator=generator).tolist()
    return order
