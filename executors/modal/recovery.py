"""Finds what a launcher has started that died before it could say so.

Modal lets nobody name a call, or read what it was given. But each container says in its log, before
anything else, which replica it is; and the log tells the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from diloco_cloud.errors import LaunchError
from diloco_cloud.executors.modal.app import waiting_or_running
from diloco_cloud.executors.modal.calls import look
from diloco_cloud.executors.modal.logs import announced_calls
from diloco_cloud.executors.modal.session import Session

#: Modal keeps logs for so long, in seconds.
_KEPT_S: Final = 30 * 86_400.0
#: Seconds to wait for calls that have no container yet, or whose first line has not come through.
_PATIENCE_S: Final = 15.0
_INTERVAL_S: Final = 0.5


#: Said of an App, and of an environment, in which there is nothing.
NOTHING_THERE: Final = (
    "Modal knows no call of %s in %s of the workspace whose token is set here. If it was launched "
    "in another: set MODAL_PROFILE (or MODAL_TOKEN_ID and MODAL_TOKEN_SECRET) and "
    "MODAL_ENVIRONMENT to those, and try again."
)


@dataclass(frozen=True)
class Found:
    """What is known of the calls of a run's App.

    Attributes:
        calls: rank, attempt and id of those that have had a container, in order.
        strangers: ids of those that go on, of which the one who asks had not known.
        hidden: how many more wait for a machine, and have no name until they get one.
    """

    calls: tuple[tuple[int, int, str], ...] = ()
    strangers: frozenset[str] = frozenset()
    hidden: int = 0


def find_calls(
    session: Session, app_name: str, sleep: Callable[[float], None], known: Collection[str] = ()
) -> Found:
    """The calls of a run's App; nothing once it is stopped.

    Waits some seconds for those that have no container yet.

    Args:
        session: with Modal.
        app_name: of the run's App.
        sleep: waits for so many seconds.
        known: ids of calls of this App that the one who asks has handles of.
    """
    app = session.app(app_name)
    if app is None:
        return Found()
    since = time.time() - _KEPT_S
    for last in (*[False] * (int(_PATIENCE_S / _INTERVAL_S) - 1), True):
        expected = waiting_or_running(session, app_name)
        calls = announced_calls(app, since)
        going = {
            call_id
            for call_id in {*calls, *known}
            if not look(session.modal, session.client, call_id).status.is_terminal
        }
        if len(going) >= expected:
            break
        if not last:
            sleep(_INTERVAL_S)
    return Found(
        calls=tuple(sorted((*calls[call_id], call_id) for call_id in calls)),
        strangers=frozenset(going.difference(known)),
        hidden=max(0, expected - len(going)),
    )


def hidden_calls(hidden: int, app_name: str) -> LaunchError:
    """Calls go on that nobody can end by their ids, as Modal does not tell them."""
    what = "1 call waits" if hidden == 1 else f"{hidden} calls wait"
    return LaunchError(
        f"{what} for a machine in {app_name}, and Modal does not tell of which replica",
        fix=f"`modal app stop {app_name}` ends it, and whatever else the run does there. Once the "
        "run has ended, so does `diloco-cloud status`, two minutes after the last launch.",
    )
