"""The rows that rollouts start from: checked before training rather than in its midst."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Final, Literal

from diloco_cloud.composer.encoding import Prompt, PromptEncoder, require_template
from diloco_cloud.composer.row_checks import check_error_meta, check_prompt
from diloco_cloud.composer.teacher_context import Hints, hinted
from diloco_cloud.errors import ConfigError

logger = logging.getLogger(__name__)

#: What a row may have for channel 2.
HINT_COLUMNS: Final = ("hint", "error_kind", "error_meta")


def columns_of(dataset: Any) -> list[str]:
    """Column names of a datasets.Dataset or IterableDataset; its first row is read if need be."""
    names = dataset.column_names
    if names is None:
        names = list(next(iter(dataset), {}))
    return list(names)


def fitting_rows(dataset: Any, encoder: PromptEncoder, max_tokens: int | None) -> tuple[Any, int]:
    """The rows whose prompt fits, and how many do not.

    A streamed data set is filtered as it is read, and the count of it is 0.

    Args:
        dataset: with a "prompt" column: text, or messages.
        encoder: of the model.
        max_tokens: the model's context without room for a completion; None for no limit.

    Raises:
        ConfigError: there is no prompt column, a prompt is empty, a conversation has no chat
            template to be written by, or no prompt fits.
    """
    if "prompt" not in columns_of(dataset):
        raise ConfigError(
            f"the data set has no 'prompt' column; it has {', '.join(columns_of(dataset))}",
            fix="Each row needs a prompt: text, or a list of messages that ends before the model's "
            "turn.",
        )
    fits = _Fit(encoder, max_tokens)
    if not hasattr(dataset, "select"):
        return dataset.filter(lambda row: fits(row["prompt"])), 0
    kept = [index for index, prompt in enumerate(dataset["prompt"]) if fits(prompt, index)]
    skipped = len(dataset) - len(kept)
    if not kept:
        raise ConfigError(
            f"none of the {len(dataset)} prompts leaves room for a completion in the model's "
            "context"
            if skipped
            else "the data set is empty",
            fix="Shorten the prompts, lower max_completion_length, or use a model with a longer "
            "context.",
        )
    if skipped:
        logger.warning(
            "%d of %d prompts are skipped: with a completion they exceed the model's context",
            skipped,
            len(dataset),
        )
        dataset = dataset.select(kept)
    return dataset, skipped


class PromptFilter:
    """:func:`fitting_rows` of all that a trainer rolls out from.

    Args:
        encoder: of the model.
        max_tokens: as there.
        is_on: whether rows have prompts at all; else they stay as they are.

    Attributes:
        skipped: prompts that did not fit, so far.
    """

    def __init__(self, encoder: PromptEncoder, max_tokens: int | None, *, is_on: bool) -> None:
        self._encoder, self._max_tokens, self._is_on = encoder, max_tokens, is_on
        self.skipped = 0

    def fitting(self, rows: Any) -> Any:
        """What is used of a data set, of some by name, or of None."""
        if rows is None or not self._is_on:
            return rows
        if isinstance(rows, Mapping):
            return {name: self.fitting(each) for name, each in rows.items()}
        rows, skipped = fitting_rows(rows, self._encoder, self._max_tokens)
        self.skipped += skipped
        return rows


class _Fit:
    """Whether a prompt leaves room for a completion."""

    def __init__(self, encoder: PromptEncoder, max_tokens: int | None) -> None:
        self._encoder, self._max_tokens = encoder, max_tokens
        self._overhead: int | None = None

    def __call__(self, prompt: Prompt, index: int | None = None) -> bool:
        check_prompt(prompt, "a row" if index is None else f"row {index}")
        if not isinstance(prompt, str):
            require_template(self._encoder.tokenizer, self._encoder.chat_template)
        if self._max_tokens is None or self._at_most(prompt) <= self._max_tokens:
            return True
        return len(self._encoder.prompt_ids(prompt)) <= self._max_tokens

    def _at_most(self, prompt: Prompt) -> float:
        """A bound of a prompt's tokens: most prompts fit, and need not be encoded to know it.

        A byte is a token at most, and no message costs more around it than the first.
        """
        if isinstance(prompt, str):
            return len(prompt.encode()) + 1
        if self._overhead is None:
            self._overhead = len(self._encoder.prompt_ids([{"role": "user", "content": "x"}]))
        total = 0
        for message in prompt:
            if set(message) - {"role", "content"} or not isinstance(message.get("content"), str):
                return math.inf
            total += len(message["content"].encode()) + self._overhead
        return total


def bring_hints(dataset: Any, hints: Hints) -> bool:
    """Whether rows have what a hint is made from.

    Raises:
        ConfigError: they have the columns, and not one row makes a hint; or none that leaves room
            for a turn in the model's context.
    """
    columns = [name for name in HINT_COLUMNS if name in columns_of(dataset)]
    if "hint" not in columns and "error_kind" not in columns:
        return False
    found = best_hint(dataset, hints) if hasattr(dataset, "select") else "usable"
    if found == "usable" or hints.reads_tool_errors:
        return found == "usable"
    if found == "too long":
        raise ConfigError(
            f"no row's prompt and hint leave room for a turn in the model's context of "
            f"{hints.max_length} tokens, so channel 2 cannot fire",
            fix="Shorten the hints, use a model with a longer context, or set alpha_sdpo=0.",
        )
    raise ConfigError(
        f"no row's {' or '.join(columns)} makes a hint, so channel 2 cannot fire",
        fix="Fill the hint column, register a template for the error kinds "
        "(diloco_cloud.composer.hints.register), or set alpha_sdpo=0.",
    )


def best_hint(dataset: Any, hints: Hints) -> Literal["usable", "too long", "none"]:
    """The most that can be said of any row: its hint can be used, it has one, it has none.

    Args:
        dataset: not a stream. Without prompts, as environments write them, any hint is usable.
        hints: makes them.

    Raises:
        ConfigError: an ``error_meta`` is no object.
    """
    names = [name for name in (*HINT_COLUMNS, "prompt") if name in columns_of(dataset)]
    found: Literal["too long", "none"] = "none"
    for index, row in enumerate(dataset.select_columns(names)):
        check_error_meta(row.get("error_meta"), f"row {index}")
        hint = hints.of_row(row)
        if hint is None:
            continue
        if _leaves_room(row.get("prompt"), hint, hints):
            return "usable"
        found = "too long"
    return found


def _leaves_room(prompt: Prompt | None, hint: str, hints: Hints) -> bool:
    if prompt is None or hints.max_length is None:
        return True
    return len(hints.encoder.prompt_ids(hinted(prompt, hint))) < hints.max_length
