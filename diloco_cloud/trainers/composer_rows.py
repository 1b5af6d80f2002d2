"""Rows of prompts as one table: checked whole, before any replica takes its share of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from diloco_cloud.composer.row_checks import check_error_meta, check_prompt
from diloco_cloud.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

_KINDS: Final = {
    str: "text",
    bool: "a truth value",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}
#: What pyarrow's errors are where values have no type in common.
_MISFITS: Final = (TypeError, ValueError, OverflowError, NotImplementedError)


@dataclass(frozen=True)
class Rows:
    """Rows, and what to call each of them.

    Attributes:
        source: that they are from, as its user knows it.
        rows: in order.
        names: of each, such as "prompts.jsonl, line 3".
    """

    source: str
    rows: list[dict[str, Any]]
    names: Sequence[str]

    @classmethod
    def made(cls, source: str, rows: list[dict[str, Any]]) -> Rows:
        """Of a task."""
        return cls(source, rows, [f"row {index} of {source}" for index in range(len(rows))])

    @classmethod
    def read(cls, path: str) -> Rows:
        """The objects of a JSONL file.

        Raises:
            ConfigError: there is no such file, or a line of it is no JSON object.
        """
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} cannot be read: {error}",
                fix="Give a JSONL file that every replica finds at this path.",
            ) from error
        found: dict[str, dict[str, Any]] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            name = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{name} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{name} is no JSON object")
            found[name] = row
        return cls(path, list(found.values()), list(found))


def as_table(rows: Rows, *, has_prompts: bool = True) -> Dataset:
    """All rows with the columns of all of them; None where a row lacks one.

    Args:
        rows: of one source.
        has_prompts: whether each must have a prompt; not where environments write them.

    Raises:
        ConfigError: there is no row or no prompt column, a prompt or an ``error_meta`` is not what
            it must be, or a column has values of two types; it names the row.
    """
    from datasets import Dataset

    columns = list(dict.fromkeys(name for row in rows.rows for name in row))
    if has_prompts and "prompt" not in columns:
        raise ConfigError(
            f"{rows.source} has no 'prompt' column; it has {', '.join(columns) or 'no row'}",
            fix="Each row needs a prompt: text, or a list of messages that ends before the model's "
            "turn.",
        )
    for row, name in zip(rows.rows, rows.names, strict=True):
        if has_prompts:
            check_prompt(row.get("prompt"), name)
        check_error_meta(row.get("error_meta"), name)
    table = {column: [row.get(column) for row in rows.rows] for column in columns}
    try:
        return Dataset.from_dict(table)
    except _MISFITS as error:
        for column, values in table.items():
            if (index := _first_misfit(values)) is not None:
                raise ConfigError(
                    f"{rows.names[index]} has {_kind(values[index])} for {column!r}, which is of "
                    "another type than in the rows before it",
                    fix="Give a column one type in all rows: prompts all as text or all as "
                    "messages, objects with values of the same types.",
                ) from error
        raise


def _first_misfit(values: list[Any]) -> int | None:
    """Index of the first value that cannot be in a column with those before it; None if all can."""
    if _fit(values):
        return None
    low, high = 0, len(values)  # the first `low` values fit, the first `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fit(values[:middle]) else (low, middle)
    return low


def _fit(values: list[Any]) -> bool:
    from datasets import Dataset

    try:
        Dataset.from_dict({"column": values})
    except _MISFITS:
        return False
    return True


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def dealt(
    count: int, place: int, places: int, *, shuffle: Callable[[list[int]], None], first: set[int]
) -> list[int]:
    """Indices of the rows that one of ``places`` gets: one in each ``places``, in a mixed order.

    Args:
        count: of all rows.
        place: whose share, from 0.
        places: in all.
        shuffle: mixes a list in the same way for all places.
        first: rows of which all places are to have as many, as far as they go.
    """
    order = list(range(count))
    shuffle(order)
    order.sort(key=lambda index: index not in first)
    return order[place::places]
