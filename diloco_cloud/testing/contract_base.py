"""What all parts of the contract suite share: what a backend says of itself, and its fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import ClassVar

import pytest

from diloco_cloud.executor import ReplicaHandle, ServerlessExecutor
from diloco_cloud.testing.fleet import Fleet


class ContractBase:
    """A backend as the suite sees it; a subclass overrides what differs.

    Attributes:
        gpu: asked for in every launch.
        patience_s: seconds after which a replica that ends at once counts as hanging.
        pause_s: seconds between two looks.
        shortest_timeout_s: of a replica, as the backend takes it.
        returns_results: whether ``collect`` brings back what entrypoints return; None: perhaps.
        knows_exit_codes: whether the provider tells them.
    """

    gpu: ClassVar[str | None] = None
    patience_s: ClassVar[float] = 60.0
    pause_s: ClassVar[float] = 0.05
    shortest_timeout_s: ClassVar[int] = 2
    returns_results: ClassVar[bool | None] = False
    knows_exit_codes: ClassVar[bool] = True

    @pytest.fixture
    def make_executor(self) -> Callable[[], ServerlessExecutor]:
        """Makes an executor as any process would; all of them see the same replicas."""
        raise NotImplementedError("override the fixture make_executor")

    @pytest.fixture
    def outage(self) -> AbstractContextManager[None]:
        """While it is entered, the provider cannot be reached."""
        pytest.skip("this backend's tests cannot cut off the provider")

    def unknown(self, handle: ReplicaHandle) -> ReplicaHandle:
        """A handle like this one, of a replica that the provider has never known."""
        return ReplicaHandle(handle.rank, handle.backend_name, {})

    @pytest.fixture
    def executor(self, make_executor: Callable[[], ServerlessExecutor]) -> ServerlessExecutor:
        return make_executor()

    @pytest.fixture
    def fleet(self, executor: ServerlessExecutor) -> Iterator[Fleet]:
        """Launches this test's replicas, and ends them with it."""
        fleet = Fleet(executor, gpu=self.gpu, patience_s=self.patience_s, pause_s=self.pause_s)
        yield fleet
        fleet.close()
