"""How one life of a replica ended, as its run's readers find it."""

from __future__ import annotations

import json
import signal
import time
import traceback
from dataclasses import dataclass
from typing import Any, Literal

from diloco_cloud.errors import DilocoError
from diloco_cloud.replica.identity import Identity
from diloco_cloud.replica.sigterm import EXIT_CODE


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A replica's last word.

    Attributes:
        exit_code: with which the process ends.
        reason: of a failure or cancellation.
        error: that ended it.
        result: what the train function returned.
        digest: of the global parameters.
        round: decisions that the replica had seen.
    """

    state: Literal["succeeded", "failed", "cancelled"]
    exit_code: int = 0
    reason: str | None = None
    error: BaseException | None = None
    result: Any = None
    digest: str | None = None
    round: int | None = None

    @classmethod
    def succeeded(cls, result: Any, digest: str | None, round_: int | None = None) -> Outcome:
        return cls(state="succeeded", result=result, digest=digest, round=round_)

    @classmethod
    def failed(cls, error: BaseException) -> Outcome:
        return cls(state="failed", exit_code=exit_code(error), reason="exit_code", error=error)

    @classmethod
    def terminated(cls, *, cancelled: bool) -> Outcome:
        if cancelled:
            return cls(state="cancelled", exit_code=EXIT_CODE, reason="cancelled")
        return cls(state="failed", exit_code=EXIT_CODE, reason="preempted")

    def to_json(self, identity: Identity) -> dict[str, Any]:
        """Plain JSON values. Never raises, whatever the result and the error are."""
        error = self.error
        return {
            "rank": identity.rank,
            "attempt": identity.attempt,
            "state": self.state,
            "exit_code": self.exit_code,
            "reason": self.reason,
            "error": None if error is None else _one_line(error),
            "traceback": None if error is None else "".join(traceback.format_exception(error)),
            "result": _as_json(self.result),
            "digest": self.digest,
            "round": self.round,
            "ended_at": timestamp(),
        }


def exit_code(error: BaseException) -> int:
    """The status of a process that ``error`` ends."""
    if isinstance(error, SystemExit):
        code = error.code
        if code is None:
            return 0
        # The operating system keeps the low byte. Python prints any other object and exits with 1.
        return code & 0xFF if isinstance(code, int) else 1
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def timestamp() -> float:
    """Seconds since the epoch by the local clock; for people to read, never for deadlines."""
    return round(time.time(), 3)


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
