"""What the cluster says of its jobs, asked once for all that want to know of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final

from diloco_cloud.executors.ray.api import JobsApi, RefusedError, UnreachableError

#: Ray forgets no job. A list that is longer than this costs more than asking for each job alone.
LONG_LIST: Final = 200


@dataclass
class Jobs:
    """Looks jobs up; threads that ask at the same time share one answer.

    Args:
        api: of the cluster.
        clock: seconds from any origin.
        refresh_s: seconds for which an answer is good: the polls of one look at a run share it.
    """

    api: JobsApi
    clock: Callable[[], float] = time.monotonic
    refresh_s: float = 1.0
    _lock: Lock = field(default_factory=Lock)
    _seen: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    _asked_at: float = float("-inf")
    _failure: UnreachableError | RefusedError | None = None

    def look(self, submission_id: str) -> dict[str, Any] | None:
        """A job by its id; None if the cluster does not know it.

        Raises:
            UnreachableError, RefusedError: it cannot be asked.
        """
        with self._lock:
            is_long = len(self._seen) > LONG_LIST
            if not is_long and self.clock() - self._asked_at >= self.refresh_s:
                self._refresh()
                is_long = False  # this answer is good, however long it is
            if self._failure is not None:
                raise self._failure
            if not is_long:
                return self._seen.get(submission_id)
        return self.api.job(submission_id)

    def forget_answer(self) -> None:
        """Ask again at the next look: something was just done that changes the answer."""
        with self._lock:
            self._asked_at = float("-inf")

    def _refresh(self) -> None:
        self._failure = None
        try:
            self._seen = self.api.jobs()
        except (UnreachableError, RefusedError) as error:
            self._failure = error
        self._asked_at = self.clock()
