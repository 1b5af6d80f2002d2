"""Which ends of a replica are mended by starting it again, and how soon; nothing but rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: What the machine did, or the provider; and a deadlock, which is worth another try though it may
#: well be the trainer's.
RESTARTABLE_REASONS: Final = frozenset(
    {"preempted", "lost", "no_capacity", "timeout", "out_of_memory", "hung"}
)
#: Seconds before the second restart in a row; each one after waits twice as long, up to a limit.
FIRST_DELAY_S: Final = 10.0
#: The same where the provider had no machine: it will not have one ten seconds later.
CAPACITY_DELAY_S: Final = 60.0
LONGEST_DELAY_S: Final = 600.0
#: A start that was announced so many seconds ago, and neither completed nor renewed, was abandoned.
ABANDONED_S: Final = 60.0
#: Seconds between two signs that a start is still being worked at.
RENEWAL_S: Final = 15.0
#: A run that no supervisor has looked at for so many seconds is not supervised.
UNSUPERVISED_S: Final = 60.0


def is_restartable(
    reason: str | None, exit_code: int | None, outcome: Mapping[str, Any] | None
) -> bool:
    """Whether a replica that failed might well succeed when it is started again.

    An error of the trainer's own would only happen again.

    Args:
        reason: one of :data:`diloco_cloud.executor.Reason`, the provider's or the replica's own.
        exit_code: of its process; negative, or above 128, for a signal.
        outcome: its last word; None if it died without one.
    """
    if outcome is not None and reason == outcome.get("reason") and "restartable" in outcome:
        return outcome["restartable"] is True  # the reason is its own, and so is the verdict
    if reason in RESTARTABLE_REASONS:
        return True
    if outcome is not None:
        return outcome.get("restartable") is True
    return exit_code is not None and (exit_code < 0 or 128 < exit_code <= 128 + 64)


def restart_delay(restart: int, reason: str | None) -> float:
    """Seconds from a replica's end to its next start.

    Args:
        restart: counts the restarts in a row, this one included.
        reason: of the end.
    """
    if restart <= 1:
        return 0.0
    first = CAPACITY_DELAY_S if reason == "no_capacity" else FIRST_DELAY_S
    return float(min(first * 2 ** (restart - 2), LONGEST_DELAY_S))


def stale_after(heartbeat_s: float) -> float:
    """Seconds of silence after which a replica no longer counts as alive.

    Twelve beats, so that a slow request or two do not matter; and no less than five seconds, as
    many stores tell the time of a write to the second.
    """
    return max(12 * heartbeat_s, 5.0)
