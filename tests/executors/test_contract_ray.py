"""The Ray executor keeps the contract that all executors share.

Against a dashboard that runs jobs for real. The same against a real head takes ten minutes, as Ray
starts a job in five seconds: ``DILOCO_TEST_RAY_HEAD=1``. The tests of test_ray_real.py always do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import pytest
from fakes.ray_dashboard import FakeDashboard
from ray_fixtures import dashboard, head_address, real_head

from diloco_cloud.executor import ReplicaHandle, ServerlessExecutor
from diloco_cloud.executors.ray import RayJobsExecutor
from diloco_cloud.testing import ExecutorContract

__all__ = ["dashboard", "head_address", "real_head"]


def _maker(address: str, shared: Path) -> Callable[[], ServerlessExecutor]:
    return lambda: RayJobsExecutor(
        address=address,
        python=sys.executable,
        cpus=0.1,
        secrets_dir=str(shared),
        grace=2,
        refresh_s=0.05,
    )


class _RayContract(ExecutorContract):
    def unknown(self, handle: ReplicaHandle) -> ReplicaHandle:
        return ReplicaHandle(handle.rank, handle.backend_name, {"submission_id": "nobody.r0.a0"})


class TestRay(_RayContract):
    @pytest.fixture
    def make_executor(
        self, dashboard: FakeDashboard, tmp_path: Path
    ) -> Callable[[], ServerlessExecutor]:
        return _maker(dashboard.address, tmp_path / "shared")

    @pytest.fixture
    def outage(self, dashboard: FakeDashboard) -> AbstractContextManager[None]:
        return dashboard.outage()


@pytest.mark.skipif(not os.environ.get("DILOCO_TEST_RAY_HEAD"), reason="DILOCO_TEST_RAY_HEAD=1")
class TestRayHead(_RayContract):
    patience_s: ClassVar[float] = 180.0
    pause_s: ClassVar[float] = 0.5

    @pytest.fixture
    def make_executor(self, real_head: str, tmp_path: Path) -> Callable[[], ServerlessExecutor]:
        return _maker(real_head, tmp_path / "shared")
