"""Waiting for replicas, the same on every backend that can be polled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from diloco_cloud.executor import ReplicaHandle, ReplicaResult, ReplicaStatus

#: Seconds between two looks: at first, and at most.
_SHORTEST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 10.0

Poll = Callable[[Sequence[ReplicaHandle]], Sequence[ReplicaStatus]]


def one_by_one(poll: Callable[[ReplicaHandle], ReplicaStatus]) -> Poll:
    """Polls several replicas by an executor's ``poll``."""
    return lambda handles: [poll(handle) for handle in handles]


def collect_replicas(
    handles: Sequence[ReplicaHandle],
    poll: Poll,
    *,
    timeout: float | None,
    result: Callable[[ReplicaHandle], Any] = lambda handle: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[ReplicaResult]:
    """What ``ServerlessExecutor.collect`` returns.

    A replica whose state is unknown is waited for: what cannot be reached now may answer later.

    Args:
        handles: of the replicas.
        poll: their states now, in order.
        timeout: seconds; None waits for ever.
        result: of a replica that has succeeded, where the backend can bring it back.
        clock: seconds from any origin.
        sleep: waits for so many seconds.
    """
    deadline = float("inf") if timeout is None else clock() + timeout
    statuses = list(poll(handles)) if handles else []
    pause = _SHORTEST_WAIT_S
    while any(not s.is_terminal for s in statuses) and (left := deadline - clock()) > 0:
        sleep(min(pause, left))
        pause = min(pause * 1.5, _LONGEST_WAIT_S)
        going = [i for i, status in enumerate(statuses) if not status.is_terminal]
        for i, status in zip(going, poll([handles[i] for i in going]), strict=True):
            statuses[i] = status
    pairs = zip(handles, statuses, strict=True)
    return [_result(handle, status, timeout, result) for handle, status in pairs]


def _result(
    handle: ReplicaHandle,
    status: ReplicaStatus,
    timeout: float | None,
    result: Callable[[ReplicaHandle], Any],
) -> ReplicaResult:
    value, error = None, None
    if status == "succeeded":
        value = result(handle)
    elif status.is_terminal:
        error = status.message or f"{status}: {status.reason}"
    else:
        why = f" ({status.message})" if status.message else ""
        error = f"still {status} after {timeout or 0:g} seconds{why}; it goes on"
    return ReplicaResult(
        rank=handle.rank, status=status, exit_code=status.exit_code, error=error, result=value
    )
