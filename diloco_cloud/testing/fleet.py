"""Launches replicas for a test, waits for them, and leaves none behind."""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from diloco_cloud.executor import (
    Entrypoint,
    LaunchOptions,
    ReplicaHandle,
    ReplicaResult,
    ReplicaStatus,
    ServerlessExecutor,
)
from diloco_cloud.testing.programs import MARK

PROGRAMS = "diloco_cloud.testing.programs"
_T = TypeVar("_T")


class Fleet:
    """The replicas of one test.

    Args:
        executor: launches and follows them.
        gpu: for each launch.
        timeout: seconds, for each launch that gives none.
        patience_s: seconds after which something that should happen counts as never happening.
        pause_s: seconds between two looks.

    Attributes:
        name: of every launch that gives none; no other test has it.
        handles: of all replicas launched so far.
    """

    def __init__(
        self,
        executor: ServerlessExecutor,
        *,
        gpu: str | None = None,
        timeout: int = 600,
        patience_s: float = 60.0,
        pause_s: float = 0.05,
    ) -> None:
        self.executor = executor
        self.name = f"contract-{uuid.uuid4().hex[:8]}"
        self.handles: list[ReplicaHandle] = []
        self._gpu = gpu
        self._timeout = timeout
        self._patience_s = patience_s
        self._pause_s = pause_s

    def launch(
        self,
        function: str,
        n_replicas: int = 1,
        *,
        timeout: int | None = None,
        options: LaunchOptions | None = None,
        **arguments: Any,
    ) -> list[ReplicaHandle]:
        """Launch replicas that call a function of :mod:`diloco_cloud.testing.programs`."""
        return self.launch_entrypoint(
            f"{PROGRAMS}:{function}", arguments, n_replicas, timeout=timeout, options=options
        )

    def launch_entrypoint(
        self,
        entrypoint: Entrypoint,
        arguments: dict[str, Any],
        n_replicas: int = 1,
        *,
        timeout: int | None = None,
        options: LaunchOptions | None = None,
    ) -> list[ReplicaHandle]:
        """Launch replicas of any entrypoint; what was started is known even if this raises."""
        given = LaunchOptions() if options is None else options
        seen: list[ReplicaHandle] = []

        def note(handle: ReplicaHandle) -> None:
            seen.append(handle)
            self.handles.append(handle)
            if given.on_launched is not None:
                given.on_launched(handle)

        named = self.name if given.name == LaunchOptions().name else given.name
        handles = self.executor.launch_replicas(
            n_replicas,
            entrypoint,
            arguments,
            gpu=self._gpu,
            timeout=self._timeout if timeout is None else timeout,
            options=dataclasses.replace(given, name=named, on_launched=note),
        )
        self.handles += [handle for handle in handles if handle not in seen]
        return handles

    def until(self, look: Callable[[], _T | None], what: str) -> _T:
        """What ``look`` returns once it is true; the test fails if that never happens."""
        deadline = time.monotonic() + self._patience_s
        while not (found := look()):
            assert time.monotonic() < deadline, f"{what}: not within {self._patience_s:g} seconds"
            time.sleep(self._pause_s)
        return found

    def reaches(self, handle: ReplicaHandle, *states: str) -> ReplicaStatus:
        """The replica's status once it is in one of ``states``."""
        last: list[ReplicaStatus] = []

        def look() -> ReplicaStatus | None:
            last[:] = [self.executor.poll(handle)]
            assert last[0] in states or not last[0].is_terminal, (
                f"replica {handle.rank} is {last[0]} ({last[0].message}), not {' or '.join(states)}"
            )
            return last[0] if last[0] in states else None

        return self.until(look, f"replica {handle.rank} is {' or '.join(states)}")

    def collect(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaResult]:
        """The results of replicas that all end soon."""
        results = self.executor.collect(handles, timeout=self._patience_s)
        for result in results:
            assert result["status"].is_terminal, f"replica {result['rank']}: {result['error']}"
        return results

    def output(self, handle: ReplicaHandle, text: str, *, n_lines: int = 200) -> str:
        """The replica's log once ``text`` is in it."""

        def look() -> str | None:
            log = self.executor.stream_logs(handle, n_lines=n_lines)
            return log if text in log else None

        return self.until(look, f"{text!r} is in the log of replica {handle.rank}")

    def told(self, handle: ReplicaHandle) -> Any:
        """The last JSON value that the replica's program has told."""

        def complete(log: str) -> list[str]:
            whole = log if log.endswith("\n") else log + "\n"
            return [line for line in whole.split("\n")[:-1] if MARK in line]

        def look() -> list[Any] | None:
            found = complete(self.executor.stream_logs(handle))
            try:
                return [json.loads(found[-1].partition(MARK)[2])] if found else None
            except ValueError:  # half a line
                return None

        return self.until(look, f"replica {handle.rank} tells something")[0]

    def close(self) -> None:
        """Cancel whatever still runs, and wait for its end."""
        going = [h for h in self.handles if not self.executor.poll(h).is_terminal]
        for handle in going:
            self.executor.cancel(handle)
        self.executor.collect(going, timeout=self._patience_s)
