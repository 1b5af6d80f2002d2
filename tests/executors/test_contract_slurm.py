"""The Slurm executor keeps the contract of all executors, on a real cluster if there is one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import pytest
from fakes.slurm_cluster import Cluster
from slurm_fixtures import fake_slurm, real_slurm, truest_slurm

from diloco_cloud.executor import ReplicaHandle, ServerlessExecutor
from diloco_cloud.executors.slurm import SlurmExecutor
from diloco_cloud.testing import ExecutorContract

__all__ = ["fake_slurm", "real_slurm", "truest_slurm"]


class TestSlurm(ExecutorContract):
    pause_s: ClassVar[float] = 0.1
    gpu: ClassVar[str | None] = None

    @pytest.fixture
    def make_executor(
        self, truest_slurm: Cluster, tmp_path: Path
    ) -> Callable[[], ServerlessExecutor]:
        return lambda: SlurmExecutor(directory=str(tmp_path / "shared"), refresh_s=0.1)

    @pytest.fixture
    def outage(self, truest_slurm: Cluster) -> AbstractContextManager[None]:
        return truest_slurm.outage()

    def unknown(self, handle: ReplicaHandle) -> ReplicaHandle:
        metadata = {**handle.metadata, "job": "987654", "directory": "/nonexistent/0.0-00000000"}
        return ReplicaHandle(handle.rank, handle.backend_name, metadata)
