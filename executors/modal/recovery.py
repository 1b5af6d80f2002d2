"""Finds what a launcher has started that died before it could say so.

Modal lets nobody name a call, or read what it was given. But each container says in its log, before
anything else, which replica it is; and the log tells the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from diloco_cloud.executors.modal.app import waiting_or_running
from diloco_cloud.executors.modal.calls import look
from diloco_cloud.executors.modal.logs import announced_calls
from diloco_cloud.executors.modal.session import Session

#: Modal keeps logs for so long, in seconds.
_KEPT_S: Final = 30 * 86_400.0
#: Seconds to wait for calls that have no container yet, or whose first line has not come through.
_PATIENCE_S: Final = 15.0
_INTERVAL_S: Final = 0.5


def find_calls(
    session: Session, app_name: str, sleep: Callable[[float], None]
) -> list[tuple[int, int, str]]:
    """Rank, attempt and id of the calls of a run's App, in order; none once it is stopped.

    A call that still waits for a machine after some seconds is not found.

    Args:
        session: with Modal.
        app_name: of the run's App.
        sleep: waits for so many seconds.
    """
    app = session.app(app_name)
    if app is None:
        return []
    since = time.time() - _KEPT_S
    for _ in range(int(_PATIENCE_S / _INTERVAL_S)):
        expected = waiting_or_running(session, app_name)
        calls = announced_calls(app, since)
        going = sum(
            not look(session.modal, session.client, call_id).status.is_terminal for call_id in calls
        )
        if going >= expected:
            break
        sleep(_INTERVAL_S)
    return sorted((rank, attempt, call_id) for call_id, (rank, attempt) in calls.items())
