"""Batches for the three channels from agentic traces.

Channel 1 has every assistant turn of a trace, channel 2 the turns that went wrong, read once more
behind a hint, channel 3 the preference pairs. Rows are padded on the right, so a causal model's
logits at real tokens need no attention mask; masks are 0 and 1.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from diloco_cloud.composer.pieces import CONTEXT, PieceTokenizer, Tokens
from diloco_cloud.composer.trace import (
    TokenizerLike,
    TraceExample,
    TraceTurn,
    check_example,
    check_pair,
)
from diloco_cloud.composer.trace_rows import TraceRow, TraceRows
from diloco_cloud.composer.transcript import Transcriber
from diloco_cloud.composer.truncation import keep_turns
from diloco_cloud.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass
class CollatorConfig:
    """What :class:`ComposerDataCollator` does with traces.

    Attributes:
        max_seq_len: most tokens of a row, the teacher's hints included; not more than the
            model's context.
        max_dpo_seq_len: most tokens of either side of a preference pair.
        pad_token_id: fills rows up where the tokenizer has no padding token.
        ignore_index: for whoever makes labels of ids and a mask; the collator's masks are 0 and 1.
        enable_sdpo: make channel 2's tensors.
        hint_generator: ``(error_kind, error_meta)`` to the hint's text, or None where there is
            none, such as :func:`diloco_cloud.composer.hints.dispatch`. Without it there is no
            channel 2.
        enable_replay_dpo: make channel 3's tensors.
        rlvr_reward_key: where an example's reward is.

    Raises:
        ConfigError: a length below 1.
    """

    max_seq_len: int = 4096
    max_dpo_seq_len: int = 2048
    pad_token_id: int = 0
    ignore_index: int = -100
    enable_sdpo: bool = True
    hint_generator: Callable[[str, Any], str | None] | None = None
    enable_replay_dpo: bool = True
    rlvr_reward_key: str = "final_reward"

    def __post_init__(self) -> None:
        for name in ("max_seq_len", "max_dpo_seq_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", fix="It counts tokens.")


@dataclass
class ComposerDataCollator:
    """Makes a batch of traces ready for the composer's losses.

    What cannot be used is left out and counted, never cut through. ``skipped`` counts by reason,
    since the collator was made and in this process (a DataLoader's workers have their own):

    - ``example_too_long``: not even system turn, question and last answer fit; the row is left out.
    - ``error_turn_too_long``: its hint, its question and the turn itself do not fit together, or
      not together with a later error's; no channel 2 for it.
    - ``no_hint``: the generator had none for this error; no channel 2 for it.
    - ``turns_dropped``: turns left out so that the rest fits (:func:`truncation.keep_turns`).
    - ``pair_too_long``, ``pair_without_difference``: no channel 3 for it.

    ``active_tokens`` counts the tokens of each channel's masks: ``response``, ``sdpo`` and
    ``replay_dpo`` (both sides).

    Args:
        tokenizer: with a chat template.
        config: see there.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    tokenizer: TokenizerLike
    config: CollatorConfig = field(default_factory=CollatorConfig)
    skipped: Counter[str] = field(default_factory=Counter, init=False)
    active_tokens: Counter[str] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        self._transcriber = Transcriber(self.tokenizer)
        self._pieces = PieceTokenizer(self.tokenizer)
        self._rows = TraceRows(
            self._transcriber,
            self._pieces,
            self.config.max_seq_len,
            self.config.hint_generator if self.config.enable_sdpo else None,
            self.skipped,
        )

    def __call__(self, batch: Sequence[TraceExample]) -> dict[str, Tensor]:
        """Tensors of a batch.

        Args:
            batch: examples; those that do not fit are left out.

        Returns:
            With B rows kept, always: ``input_ids``, ``attention_mask``, ``response_mask``, all
            (B, T_s) of int64, and ``rewards`` (B,) of float32.

            Where an error turn has a hint: ``ctx_teacher_input_ids``,
            ``ctx_teacher_attention_mask`` and ``sdpo_loss_mask``, (B, T_t), and
            ``sdpo_student_mask`` (B, T_s). In each row the two masks mark the same tokens: the
            n-th that one marks is the n-th of the other. A row without such a turn has one token
            for the teacher, not marked.

            Where there are P usable preference pairs: ``dpo_chosen_input_ids``,
            ``dpo_chosen_attention_mask``, ``dpo_chosen_response_mask``, (P, T_c), and the same of
            ``dpo_rejected``, (P, T_r). Their reference log-probabilities are the trainer's work.

        Raises:
            ConfigError: an example that is not well-formed, a conversation that the template
                refuses, or nothing left of the batch.
        """
        before = Counter(self.skipped)
        rows: list[TraceRow] = []
        rewards: list[float] = []
        for example in batch:
            check_example(example, self.config.rlvr_reward_key)
            if row := self._rows.row(example["turns"]):
                rows.append(row)
                rewards.append(float(cast(Any, example)[self.config.rlvr_reward_key]))
        if not rows:
            raise ConfigError(
                f"none of the {len(batch)} examples of a batch fits {self.config.max_seq_len} "
                "tokens",
                fix="Raise max_seq_len, or leave out examples for which collator.fits is false.",
            )
        tensors = self._student(rows)
        tensors["rewards"] = torch.tensor(rewards, dtype=torch.float32)
        if any(row.teacher for row in rows):
            tensors |= self._teacher(rows)
        if self.config.enable_replay_dpo:
            tensors |= self.pairs([pair for one in batch for pair in one.get("dpo_pairs") or []])
        self._tell_first(before)
        return tensors

    def fits(self, example: TraceExample) -> bool:
        """Whether a batch would have a row for this example. Counts nothing."""
        check_example(example, self.config.rlvr_reward_key)
        return self._rows.fits(example["turns"])

    def pairs(self, pairs: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Channel 3's tensors alone, for a stream of pairs of its own.

        Args:
            pairs: ``DPOPair`` mappings.

        Returns:
            As :meth:`__call__`; empty where no pair is usable.

        Raises:
            ConfigError: a pair that is not well-formed, or refused by the template.
        """
        sides = [both for number, pair in enumerate(pairs) if (both := self._pair(pair, number))]
        if not sides:
            return {}
        tensors: dict[str, Tensor] = {}
        for number, side in enumerate(("chosen", "rejected")):
            rows = [both[number] for both in sides]
            ids, attention = self._padded(rows)
            mask = _padded_rows(([turn != CONTEXT for turn in row.turns] for row in rows), 0)
            tensors[f"dpo_{side}_input_ids"] = ids
            tensors[f"dpo_{side}_attention_mask"] = attention
            tensors[f"dpo_{side}_response_mask"] = mask
            self.active_tokens["replay_dpo"] += int(mask.sum())
        return tensors

    def _student(self, rows: Sequence[TraceRow]) -> dict[str, Tensor]:
        ids, attention = self._padded([row.student for row in rows])
        response = _padded_rows(([t != CONTEXT for t in row.student.turns] for row in rows), 0)
        self.active_tokens["response"] += int(response.sum())
        return {"input_ids": ids, "attention_mask": attention, "response_mask": response}

    def _teacher(self, rows: Sequence[TraceRow]) -> dict[str, Tensor]:
        # A model wants at least one token in each row.
        read = [row.teacher or Tokens(row.student.ids[:1], [CONTEXT]) for row in rows]
        ids, attention = self._padded(read)
        marked = _padded_rows(
            (
                [t in row.errors for t in tokens.turns]
                for row, tokens in zip(rows, read, strict=True)
            ),
            0,
        )
        student = _padded_rows(([t in row.errors for t in row.student.turns] for row in rows), 0)
        self.active_tokens["sdpo"] += int(marked.sum())
        return {
            "ctx_teacher_input_ids": ids,
            "ctx_teacher_attention_mask": attention,
            "sdpo_loss_mask": marked,
            "sdpo_student_mask": student,
        }

    def _pair(self, pair: Mapping[str, Any], number: int) -> tuple[Tokens, Tokens] | None:
        check_pair(pair, f"preference pair {pair.get('state_id', number)!r}")
        if pair["chosen"].strip() == pair["rejected"].strip():
            self.skipped["pair_without_difference"] += 1
            return None
        state: list[TraceTurn] = list(pair["state_messages"])
        answers: list[TraceTurn] = [
            {"role": "assistant", "content": pair[side]} for side in ("chosen", "rejected")
        ]
        made: dict[int, tuple[Tokens, Tokens]] = {}
        room = self.config.max_dpo_seq_len

        def fits(kept: Sequence[int]) -> bool:
            prompt = [state[i] for i in kept[:-1]]
            chosen, rejected = (self._reply([*prompt, answer]) for answer in answers)
            made[len(kept)] = chosen, rejected
            return max(len(chosen), len(rejected)) <= room

        # Both answers follow the same prompt, so the longer one says how much of it there is.
        turns = [*state, answers[0]]
        least = self._pieces.least(turns)
        kept = keep_turns(turns, len(state), len(state), least=least, room=room, fits=fits)
        if kept is None:
            self.skipped["pair_too_long"] += 1
            return None
        return made[len(kept)]

    def _reply(self, turns: Sequence[TraceTurn]) -> Tokens:
        return self._pieces.tokens(self._transcriber.reply(turns))

    def _padded(self, rows: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        """Ids and attention mask."""
        padding = self.tokenizer.pad_token_id
        if padding is None:
            padding = self.config.pad_token_id
        ids = _padded_rows((row.ids for row in rows), padding)
        return ids, _padded_rows(([1] * len(row) for row in rows), 0)

    def _tell_first(self, before: Counter[str]) -> None:
        """Log each kind of omission when it is first met; the counters tell the rest."""
        for what in self.skipped.keys() - before.keys():
            logger.warning("traces: %s (counted in the collator's `skipped` from here on)", what)


def _padded_rows(rows: Iterable[Sequence[int]], padding: int) -> Tensor:
    """(len(rows), longest) of int64, filled up on the right."""
    tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=padding)
