"""Writes plain values as YAML: no dependency for the few forms that manifests need.

Strings that could mean something else are written as JSON strings, which YAML reads as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

#: Begins with a letter, holds nothing that YAML reads, and is no word that it knows.
_PLAIN: Final = re.compile(r"[A-Za-z][\w./-]*")
_WORDS: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def to_yaml(value: Mapping[str, Any]) -> str:
    """A document of mappings, sequences, strings, numbers, booleans and None.

    A string of several lines is written as a block.
    """
    return "\n".join(_mapping(value)) + "\n"


def _mapping(value: Mapping[str, Any]) -> Iterator[str]:
    for key, item in value.items():
        yield from _entry(f"{_scalar(key)}:", item)


def _sequence(value: Sequence[Any]) -> Iterator[str]:
    for item in value:
        if isinstance(item, Mapping) and item:
            first, *rest = _mapping(item)
            yield f"- {first}"
            yield from _indented(rest)
        else:
            yield from _entry("-", item)


def _entry(head: str, item: Any) -> Iterator[str]:
    if isinstance(item, str) and _is_block(item):
        keep = "" if item.endswith("\n") else "-"
        yield f"{head} |{keep}"
        yield from _indented(item.rstrip("\n").split("\n"))
    elif isinstance(item, Mapping) and item:
        yield head
        yield from _indented(_mapping(item))
    elif isinstance(item, (list, tuple)) and item:
        yield head
        yield from _indented(_sequence(item))
    else:
        yield f"{head} {_scalar(item)}"


def _indented(lines: Iterator[str] | Sequence[str]) -> Iterator[str]:
    for line in lines:
        yield f"  {line}" if line else ""


def _is_block(text: str) -> bool:
    """Whether a text reads well, and back, as lines of their own."""
    lines = text.removesuffix("\n").split("\n")
    return len(lines) > 1 and lines[0][:1].strip() != "" and lines[-1] != "" and _all_seen(lines)


def _all_seen(lines: Sequence[str]) -> bool:
    return all(line.isprintable() and line == line.rstrip() for line in lines)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    # As JSON would have it, except for what YAML takes for the end of a line.
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
