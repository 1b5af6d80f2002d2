"""The end of a failed replica's log, as ``status`` shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from diloco_cloud.executor import ReplicaHandle, ServerlessExecutor
from diloco_cloud.run.lives import Life
from diloco_cloud.run.logs import chunk_tail, render_tail
from diloco_cloud.run.tracebacks import end_of_log, without_plumbing
from diloco_cloud.store.base import ObjectStore

#: Lines that are shown.
TAIL_LINES = 20
#: Lines that are read for it: more, as what surrounds a trainer's own error is left out.
_READ_LINES = 200


def failure_tail(
    store: ObjectStore,
    life: Life,
    handle: ReplicaHandle | None,
    executor: ServerlessExecutor | None,
    outcome: Mapping[str, Any] | None,
) -> tuple[str, ...]:
    """What a failed life wrote last: by its executor, else by the logs in the prefix.

    Args:
        store: the run's own prefix.
        life: the life.
        handle: of it; None if it has none.
        executor: of it; None if it cannot be had here.
        outcome: its last word, whose traceback is added where the log lacks it.
    """
    lines: list[str] = []
    if executor is not None and handle is not None:
        lines = render_tail(executor.stream_logs(handle, n_lines=_READ_LINES))
    lines = lines or chunk_tail(store, *life, _READ_LINES)
    trace = str((outcome or {}).get("traceback") or "").rstrip().splitlines()
    if trace and not _says(lines, trace[-1]):
        lines += trace
    return tuple(end_of_log(without_plumbing(lines), TAIL_LINES))


def _says(lines: Iterable[str], error: str) -> bool:
    """Whether a log has the last line of a traceback, with or without the error's class."""
    message = error.partition(": ")[2] or error
    return any(message in line for line in lines)
