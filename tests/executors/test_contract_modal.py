"""The Modal executor keeps the contract that all executors share: the real SDK, a fake Modal."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import ClassVar

import pytest
from fakes.modal_cloud import FakeModal
from modal_fixtures import modal_cloud, modal_executor, modal_server

from diloco_cloud.executor import ReplicaHandle, ServerlessExecutor
from diloco_cloud.testing import ExecutorContract

__all__ = ["modal_cloud", "modal_executor", "modal_server"]

# In an outage the server drops its ends of connections; grpclib leaves them to the collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class TestModal(ExecutorContract):
    gpu: ClassVar[str | None] = "H100"
    patience_s: ClassVar[float] = 120.0
    returns_results: ClassVar[bool] = True

    #: Of which an outage uses up every second, several times.
    request_timeout_s: ClassVar[float] = 5.0

    @pytest.fixture
    def make_executor(
        self, modal_executor: Callable[..., ServerlessExecutor]
    ) -> Callable[[], ServerlessExecutor]:
        return lambda: modal_executor(request_timeout_s=self.request_timeout_s)

    @pytest.fixture
    def outage(self, modal_cloud: FakeModal) -> Iterator[AbstractContextManager[None]]:
        yield modal_cloud.outage()
        gc.collect()  # here, and not in whichever test comes next

    def unknown(self, handle: ReplicaHandle) -> ReplicaHandle:
        metadata = {**handle.metadata, "call": "fc-nobody"}
        return ReplicaHandle(handle.rank, handle.backend_name, metadata)
