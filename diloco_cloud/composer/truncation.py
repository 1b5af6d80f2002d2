"""Which turns of a conversation to keep where not all of them fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from diloco_cloud.composer.trace import TraceTurn


def keep_turns(
    turns: Sequence[TraceTurn],
    first: int,
    last: int,
    *,
    least: Sequence[int],
    room: int,
    fits: Callable[[Sequence[int]], bool],
) -> list[int] | None:
    """The most turns that fit, with all from ``first`` to ``last`` among them.

    Turns go whole and the oldest first: at the beginning an exchange (all from one question to the
    next) at a time, then, within the exchange that ``first`` is in, an assistant turn with its
    results at a time. Should that not do, the newest go, back to ``last``. The system turn stays,
    and so does the question that ``first`` belongs to: no template begins with an answer.

    Args:
        turns: a conversation, begun by the user; what follows its last assistant turn is left out.
        first: index of the first assistant turn to keep.
        last: index of the last one.
        least: a lower bound of each turn's tokens, whatever is around it.
        room: tokens there is room for. More than that is not tried: ``fits`` is expensive.
        fits: whether the turns of these indices do, where fewer turns fit better.

    Returns:
        Ascending indices, or None where even the fewest do not fit.
    """
    choices = _choices([turn["role"] for turn in turns], first, last)
    tried = lru_cache(maxsize=None)(lambda number: fits(choices[number]))
    low = 0
    while low < len(choices) and sum(least[i] for i in choices[low]) > room:
        low += 1
    # The bound is near the truth: look close to it first, then further and further away.
    high, step = low, 1
    while high < len(choices) and not tried(high):
        low, high, step = high + 1, min(high + step, len(choices)), 2 * step
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if tried(middle) else (middle + 1, high)
    return choices[low] if low < len(choices) else None


def _choices(roles: Sequence[str], first: int, last: int) -> list[list[int]]:
    """From all turns down to the fewest, each a part of the one before."""
    fixed = [0] if roles[0] == "system" else []
    end = 1 + max(i for i, role in enumerate(roles) if role == "assistant")
    questions = [
        i
        for i in range(len(fixed), first)
        if roles[i] == "user" and (not i or roles[i - 1] != "user")
    ]
    choices = [[*fixed, *range(start, end)] for start in questions]
    # The exchange of `first` opens with its question: one user turn, or several in a row.
    answer = next(i for i in range(questions[-1], end) if roles[i] == "assistant")
    opening = [*fixed, *range(questions[-1], answer)]
    later = [i for i in range(answer + 1, first + 1) if roles[i] == "assistant"]
    choices += [[*opening, *range(start, end)] for start in later]
    newest = [i + 1 for i in range(end - 2, last - 1, -1) if roles[i] == "assistant"]
    choices += [[*opening, *range(first, stop)] for stop in newest]
    return choices
