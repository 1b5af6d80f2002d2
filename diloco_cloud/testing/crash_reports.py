"""What tools that report crashes would send of an error."""

from __future__ import annotations

import traceback


def readable(error: BaseException) -> str:
    """Everything that an error, its causes and contexts tell.

    Suppressed contexts are read too, and all local variables of every frame on the way.
    """
    texts: list[str] = []
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        told = traceback.TracebackException.from_exception(one, capture_locals=True)
        texts += [str(one), repr(one), repr(one.args), repr(vars(one)), *told.format()]
        waiting += [one.__cause__, one.__context__]
    return "\n".join(texts)
