"""How one life of a replica ended, as its run's readers find it."""

from __future__ import annotations

import contextlib
import json
import signal
import time
import traceback
from dataclasses import dataclass
from typing import Any, Final, Literal

from diloco_cloud.errors import (
    DilocoError,
    ExchangeError,
    LayoutMismatchError,
    LeftRunError,
    StoreError,
    UnsupportedStoreError,
)
from diloco_cloud.executor import Reason
from diloco_cloud.replica.identity import Identity
from diloco_cloud.replica.lifetime import Cause
from diloco_cloud.replica.sigterm import EXIT_CODE

#: Attribute of an exception. The local executor's child knows it by this name, too.
_LOGGED: Final = "_diloco_logged"
_CAUSES: Final = {"preempted": "preempted", "timeout": "reached its time limit"}
#: Errors of our own that another try may not meet, and those among them that it will.
_PASSING = (ExchangeError, StoreError)
_LASTING = (LayoutMismatchError, LeftRunError, UnsupportedStoreError)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A replica's last word.

    Attributes:
        exit_code: with which the process ends.
        reason: of a failure or cancellation.
        restartable: whether to start this rank again may get it further; see :func:`restartable`.
        error: that ended it.
        message: what ended it, where that was no error.
        result: what the train function returned.
        digest: of the global parameters.
        round: decisions that the replica had seen.
    """

    state: Literal["succeeded", "failed", "cancelled"]
    exit_code: int = 0
    reason: Reason | None = None
    restartable: bool = False
    error: BaseException | None = None
    message: str | None = None
    result: Any = None
    digest: str | None = None
    round: int | None = None

    @classmethod
    def succeeded(cls, result: Any, digest: str | None, round_: int | None = None) -> Outcome:
        return cls(state="succeeded", result=result, digest=digest, round=round_)

    @classmethod
    def failed(cls, error: BaseException) -> Outcome:
        return cls(
            state="failed",
            exit_code=exit_code(error),
            reason="out_of_memory" if _is_out_of_memory(error) else "exit_code",
            restartable=restartable(error),
            error=error,
        )

    @classmethod
    def ended_early(cls, cause: Cause, *, cancelled: bool, handed_over: bool) -> Outcome:
        """Of a life that SIGTERM or the time limit has ended, by a user's wish or without."""
        why = "cancelled" if cancelled else _CAUSES[cause]
        message = f"{why}; its work was handed over" if handed_over else why
        if cancelled:
            return cls(state="cancelled", exit_code=EXIT_CODE, reason="cancelled", message=message)
        return cls(
            state="failed", exit_code=EXIT_CODE, reason=cause, restartable=True, message=message
        )

    def to_json(self, identity: Identity) -> dict[str, Any]:
        """Plain JSON values. Never raises, whatever the result and the error are."""
        error = self.error
        return {
            "rank": identity.rank,
            "attempt": identity.attempt,
            "state": self.state,
            "exit_code": self.exit_code,
            "reason": self.reason,
            "restartable": self.restartable,
            "error": self.message if error is None else _one_line(error),
            "traceback": None if error is None else "".join(traceback.format_exception(error)),
            "result": _as_json(self.result),
            "digest": self.digest,
            "round": self.round,
            "ended_at": timestamp(),
        }


def restartable(error: BaseException) -> bool:
    """Whether a life that ``error`` has ended is worth another.

    =========================================================  =====================================
    the store failed; peers did not come; this replica         yes: a new life reads the agreed
    drifted from the others                                    state and goes on from there
    another layout than the others'; the rank has left for     no: every life will meet it
    good; a store that cannot do what a run needs
    a setting, the trainer's own exceptions and exit codes,    no: the user's to mend
    Ctrl-C
    out of memory, on the host or an accelerator               no: the next life has the same batch
                                                               and the same memory, and is billed
    =========================================================  =====================================

    A life that was preempted, or has handed over at its time limit, did not end by an error: it is
    always worth another. One whose end a user asked for is not.
    """
    return isinstance(error, _PASSING) and not isinstance(error, _LASTING)


def exit_code(error: BaseException) -> int:
    """The status of a process that ``error`` ends."""
    if isinstance(error, SystemExit):
        code = error.code
        if code is None:
            return 0
        # The operating system keeps the low byte. Python prints any other object and exits with 1.
        return code & 0xFF if isinstance(code, int) else 1
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def mark_logged(error: BaseException) -> None:
    """Note that a replica's log has ``error``: whoever ends the process need not print it again."""
    with contextlib.suppress(Exception):  # a class may refuse attributes
        setattr(error, _LOGGED, True)


def is_logged(error: BaseException) -> bool:
    """Whether a replica's log has ``error`` already."""
    return bool(getattr(error, _LOGGED, False))


def timestamp() -> float:
    """Seconds since the epoch by the local clock; for people to read, never for deadlines."""
    return round(time.time(), 3)


def _is_out_of_memory(error: BaseException) -> bool:
    # torch's is known by its name: torch may not be loaded, and takes seconds.
    names = {kind.__name__ for kind in type(error).__mro__}
    return not names.isdisjoint(("MemoryError", "OutOfMemoryError"))


def _one_line(error: BaseException) -> str:
    name = type(error).__name__
    try:
        lines = (error.message if isinstance(error, DilocoError) else str(error)).strip()
        return f"{name}: {lines.splitlines()[0]}" if lines else repr(error)
    except Exception:  # an exception that cannot say what it is
        return name


def _as_json(value: Any) -> Any:
    """``value`` if JSON can hold it, else its representation."""
    try:
        json.dumps(value)
        return value
    except Exception:  # anything may happen on the way through a foreign object
        try:
            return repr(value)
        except Exception:
            return f"<{type(value).__name__}>"
