"""The executors of a run's replicas, which may sit on several backends."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from types import MappingProxyType
from typing import Any, TypeAlias

from diloco_cloud.errors import UsageError
from diloco_cloud.executor import ServerlessExecutor
from diloco_cloud.executor_registry import get_executor

#: What a caller may give in the place of the registry's: one for the run's own backend, or several
#: by backend.
Given: TypeAlias = ServerlessExecutor | Mapping[str, ServerlessExecutor] | None


class Executors:
    """Makes each backend's executor when it is first needed.

    Args:
        backend: entry-point name of the run's own backend.
        given: its executor, or executors by backend; default: the registry's.
        args: by backend, keyword arguments of its executor.
    """

    def __init__(
        self,
        backend: str,
        given: Given = None,
        args: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        self.default = backend
        self._args = args
        self._made = _by_backend(backend, given)
        self._lock = Lock()

    def get(self, backend: str | None = None) -> ServerlessExecutor:
        """The executor of a backend; by default of the one that the run's spec names.

        Raises:
            UsageError: it is not installed on this machine.
        """
        name = backend or self.default
        with self._lock:
            if name not in self._made:
                self._made[name] = get_executor(name, **self._args.get(name, {}))
            return self._made[name]

    @property
    def made(self) -> dict[str, ServerlessExecutor]:
        """By backend, those that were given or needed so far."""
        with self._lock:
            return dict(self._made)

    def find(self, backend: str) -> tuple[ServerlessExecutor | None, str | None]:
        """The executor of a backend; or None, and why it can't be had on this machine."""
        try:
            return self.get(backend), None
        except UsageError as error:
            return None, error.message


def _by_backend(backend: str, given: Given) -> dict[str, ServerlessExecutor]:
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else {backend: given}
