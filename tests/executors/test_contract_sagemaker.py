"""The SageMaker executor keeps the contract that all executors share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar

import pytest
from fakes.aws_server import FakeAws
from sagemaker_fixtures import IMAGE, OUTPUT, aws

from diloco_cloud.executor import ReplicaHandle, ServerlessExecutor
from diloco_cloud.executors.sagemaker import SageMakerExecutor
from diloco_cloud.testing import ExecutorContract

__all__ = ["aws"]


class TestSageMaker(ExecutorContract):
    gpu: ClassVar[str] = "A10G"

    @pytest.fixture
    def make_executor(self, aws: FakeAws) -> Callable[[], ServerlessExecutor]:
        aws.training.term_grace_s = 1.0
        return lambda: SageMakerExecutor(
            role=aws.role, image=IMAGE, output_uri=OUTPUT, refresh_s=0.05
        )

    @pytest.fixture
    def outage(self, aws: FakeAws) -> AbstractContextManager[None]:
        return aws.outage()

    def unknown(self, handle: ReplicaHandle) -> ReplicaHandle:
        metadata = {**handle.metadata, "name": "never-was-r0-a0", "launch": "never-was"}
        return ReplicaHandle(handle.rank, handle.backend_name, metadata)
