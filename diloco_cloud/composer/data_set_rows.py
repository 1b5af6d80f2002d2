"""What a data set does to the rows it was made from, undone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def without_none(value: Any) -> Any:
    """A copy of ``value`` whose mappings, however deep, have no key with None.

    Arrow has one type for a column: it gives each row's structs the keys of all rows', and fills up
    with None. What is None in a list was written there, and stays.
    """
    if isinstance(value, Mapping):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [without_none(each) for each in value]
    return value
