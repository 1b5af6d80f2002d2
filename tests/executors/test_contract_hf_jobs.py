"""The Hugging Face Jobs executor keeps the contract that all executors share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import ClassVar

import pytest
from fakes.hf_hub import FakeHub, fake_hub

from diloco_cloud.executor import ReplicaHandle, ServerlessExecutor
from diloco_cloud.executors.hf_jobs import HFJobsExecutor
from diloco_cloud.testing import ExecutorContract


class TestHFJobs(ExecutorContract):
    gpu: ClassVar[str | None] = "a10g-large"

    @pytest.fixture
    def hub(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
        with fake_hub(grace_s=0.5) as hub:
            monkeypatch.setenv("HF_TOKEN", hub.token)
            yield hub

    @pytest.fixture
    def make_executor(self, hub: FakeHub) -> Callable[[], ServerlessExecutor]:
        return lambda: HFJobsExecutor(
            image="registry.test/diloco", endpoint=hub.endpoint, refresh_s=0.05
        )

    @pytest.fixture
    def outage(self, hub: FakeHub) -> AbstractContextManager[None]:
        return hub.outage()

    def unknown(self, handle: ReplicaHandle) -> ReplicaHandle:
        return ReplicaHandle(handle.rank, "hf-jobs", {**handle.metadata, "job_id": "0" * 24})
