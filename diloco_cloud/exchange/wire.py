"""Reading JSON that anybody may have written: known fields, of known types, within bounds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from diloco_cloud.errors import CorruptContributionError

T = TypeVar("T")

#: Counters beyond this are nobody's; floats stay exact well above it.
_LARGEST = 2**53


def parse(data: bytes | str, what: str, build: Callable[[Any], T]) -> T:
    """Decode JSON and build a value from it.

    Args:
        data: the text.
        what: names it in the error.
        build: may raise ``ValueError``, ``TypeError`` or ``KeyError`` for what it cannot accept.

    Raises:
        CorruptContributionError: the text is no JSON, or ``build`` refuses what it says.
    """
    try:
        return build(json.loads(data))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise CorruptContributionError(f"{what} cannot be read: {error}") from None


def fields(
    values: Any,
    kinds: Mapping[str, Callable[[Any], Any]],
    optional: Collection[str] = (),
) -> dict[str, Any]:
    """``values`` if it is an object of exactly these fields, each passed through its checker.

    Args:
        values: decoded JSON.
        kinds: the checkers, by field.
        optional: fields that may be absent, and are then absent from the result.
    """
    if not isinstance(values, dict) or not set(kinds) - set(optional) <= set(values) <= set(kinds):
        raise ValueError("other fields than expected")
    return {name: kind(values[name]) for name, kind in kinds.items() if name in values}


def text(value: Any) -> str:
    """A string of reasonable length."""
    if not isinstance(value, str) or len(value) > 10**6:
        raise ValueError("not a string")
    return value


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError("not true or false")
    return value


def count(value: Any) -> int:
    """A whole number from 0 to 2**53."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        raise ValueError("not a count")
    return value


def magnitude(value: Any) -> float:
    """A finite number, 0 or above."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError("not a number")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError("not a magnitude")
    return float(value)


def positive(value: Any) -> float:
    """A finite number above 0, no larger than the product of two counts."""
    number = magnitude(value)
    if not 0 < number <= _LARGEST**2:
        raise ValueError("not a positive number")
    return number


def magnitude_or(mark: float) -> Callable[[Any], float]:
    """A checker for a magnitude, or the number that stands in its place."""

    def check(value: Any) -> float:
        return mark if value == mark and not isinstance(value, bool) else magnitude(value)

    return check


def optional(kind: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """A checker for null, or something else."""
    return lambda value: None if value is None else kind(value)


def one_of(*choices: str) -> Callable[[Any], str]:
    """A checker for one of a few strings."""

    def check(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"not one of {', '.join(choices)}")
        return str(value)

    return check


def many(kind: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...]]:
    """A checker for a list."""

    def check(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise ValueError("not a list")
        return tuple(kind(item) for item in value)

    return check
