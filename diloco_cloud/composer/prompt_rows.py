"""The rows that rollouts start from: checked before training rather than in its midst."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from diloco_cloud.composer.encoding import Prompt, PromptEncoder, require_template
from diloco_cloud.composer.teacher_context import Hints
from diloco_cloud.errors import ConfigError

logger = logging.getLogger(__name__)


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


def fitting_sets(datasets: Any, encoder: PromptEncoder, max_tokens: int | None) -> tuple[Any, int]:
    """:func:`fitting_rows` of what a trainer evaluates on: a data set, some by name, or None."""
    if datasets is None:
        return None, 0
    if not isinstance(datasets, Mapping):
        return fitting_rows(datasets, encoder, max_tokens)
    found = {name: fitting_rows(rows, encoder, max_tokens) for name, rows in datasets.items()}
    kept = {name: rows for name, (rows, _) in found.items()}
    return kept, sum(skipped for _, skipped in found.values())


class _Fit:
    """Whether a prompt leaves room for a completion."""

    def __init__(self, encoder: PromptEncoder, max_tokens: int | None) -> None:
        self._encoder, self._max_tokens = encoder, max_tokens
        self._overhead: int | None = None

    def __call__(self, prompt: Prompt | None, index: int | None = None) -> bool:
        if not prompt:
            where = "" if index is None else f" {index}"
            raise ConfigError(f"the prompt of row{where} is empty", fix="Leave such rows out.")
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
            if set(message) - {"role", "content"} or not isinstance(message["content"], str):
                return math.inf
            total += len(message["content"].encode()) + self._overhead
        return total


def bring_hints(dataset: Any, hints: Hints) -> bool:
    """Whether rows have what a hint is made from.

    Raises:
        ConfigError: they have the columns, and not one row makes a hint.
    """
    columns = [name for name in ("hint", "error_kind", "error_meta") if name in columns_of(dataset)]
    if "hint" not in columns and "error_kind" not in columns:
        return False
    if hasattr(dataset, "select") and not any(
        hints.of_row(row) for row in dataset.select_columns(columns)
    ):
        raise ConfigError(
            f"no row's {' or '.join(columns)} makes a hint, so channel 2 cannot fire",
            fix="Fill the hint column, register a template for the error kinds "
            "(diloco_cloud.composer.hints.register), or set alpha_sdpo=0.",
        )
    return True
