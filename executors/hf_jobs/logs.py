"""Reading the end of a job's log, which the hub only offers as a stream."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Final

logger = logging.getLogger(__name__)

#: Seconds of silence after a line, after which a running job's log counts as read. The client's own
#: wait is five seconds, and starts again with each line.
QUIET_S: Final = 0.7
#: Seconds for the first line to come.
PATIENCE_S: Final = 8.0
#: Seconds altogether: a job that never stops writing must not be read for ever.
LONGEST_S: Final = 20.0


def read_tail(lines: Callable[[], Iterable[str]], n_lines: int, clock: Callable[[], float]) -> str:
    """The last lines of a stream that may not end.

    Args:
        lines: opens the stream; raises, or ends, as it likes.
        n_lines: how many at most.
        clock: seconds from any origin.
    """
    arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def pump() -> None:
        try:
            for line in lines():
                arrived.put(line)
        except Exception as error:  # the log is what could be had of it
            logger.info("the log could not be read to its end: %s", type(error).__name__)
        finally:
            arrived.put(None)

    # Not joined: the client lets go of the stream when that has been silent for long enough.
    threading.Thread(target=pump, name="hf-jobs-log", daemon=True).start()
    found: list[str] = []
    deadline = clock() + LONGEST_S
    while clock() < deadline:
        try:
            line = arrived.get(timeout=QUIET_S if found else PATIENCE_S)
        except queue.Empty:
            break
        if line is None:
            break
        found += line.rstrip("\r\n").split("\n")
    return "".join(f"{line}\n" for line in found[-n_lines:])
