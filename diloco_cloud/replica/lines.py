"""A log record as one line of JSON, and handlers that never get in a trainer's way."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import traceback
from typing import Any, TextIO


class JsonLines(logging.Formatter):
    """One JSON object per record: ts (s since the epoch), level, rank, attempt, logger, message."""

    def __init__(self, rank: int, attempt: int) -> None:
        super().__init__()
        self._identity = {"rank": rank, "attempt": attempt}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": round(record.created, 3),
            "level": record.levelname,
            **self._identity,
            "logger": record.name,
            "message": _message(record),
        }
        if record.exc_info:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line)


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # the arguments do not fit the format; what was said matters all the same
        return f"{record.msg} {record.args!r}"


class LossyHandler(logging.Handler):
    """Loses a line that it cannot write.

    The standard handler reports it on ``sys.stderr``, which is logged here, and so on for ever.
    """

    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing."""


class LineStream(LossyHandler, logging.StreamHandler[TextIO]):
    """Writes lines to a stream, for as long as anybody reads it."""

    def settle(self) -> None:
        """Let the interpreter exit as it was going to, even if nobody reads the stream any more.

        It flushes the stream at exit, and changes its exit code to 120 if that fails.
        """
        try:
            self.stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.stream.fileno())
                os.close(nowhere)
