"""Work beside the training thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Run ``work`` in a thread of its own.

    A daemon thread: one that is stuck in a transfer must not keep a process alive that was told to
    end, as an executor's threads would.
    """
    future: Future[T] = Future()
    threading.Thread(target=_run, args=(future, work), name=name, daemon=True).start()
    return future


def _run(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
        # Or the error's traceback would keep all of this, and itself, in memory.
        del future, work
