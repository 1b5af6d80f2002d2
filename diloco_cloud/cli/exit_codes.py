"""How ``launch``, ``wait`` and ``logs -f`` end, for scripts; the scheme is SkyPilot's."""

from __future__ import annotations

from typing import Final

SUCCEEDED: Final = 0
OWN_ERROR: Final = 1
USAGE: Final = 2
FAILED: Final = 100
NOT_FINISHED: Final = 101
NOT_FOUND: Final = 102
CANCELLED: Final = 103
INTERRUPTED: Final = 130

_OF_STATE: Final = {"succeeded": SUCCEEDED, "failed": FAILED, "cancelled": CANCELLED}


def of_state(state: str) -> int:
    """The exit code that tells ``state``."""
    return _OF_STATE.get(state, NOT_FINISHED)


def of_error(error: Exception) -> int:
    """The exit code that tells ``error``."""
    from diloco_cloud.errors import RunNotFoundError, UsageError

    if isinstance(error, RunNotFoundError):
        return NOT_FOUND
    return USAGE if isinstance(error, UsageError) else OWN_ERROR
