"""The Slurm executor keeps the contract of all executors, on a real cluster if there is one.

The fake keeps part of it where there is, too: other tests rely on it everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import pytest
from fakes.slurm_cluster import Cluster, daemons
from slurm_fixtures import fake_slurm, real_slurm, truest_slurm

from diloco_cloud.executor import ReplicaHandle, ServerlessExecutor
from diloco_cloud.executors.slurm import SlurmExecutor
from diloco_cloud.testing import ExecutorContract
from diloco_cloud.testing.contract_base import ContractBase
from diloco_cloud.testing.contract_handles import HandlesContract

__all__ = ["fake_slurm", "real_slurm", "truest_slurm"]


class OnSlurm(ContractBase):
    pause_s: ClassVar[float] = 0.1
    gpu: ClassVar[str | None] = None

    @pytest.fixture
    def cluster(self) -> Cluster:
        raise NotImplementedError

    @pytest.fixture
    def make_executor(self, cluster: Cluster, tmp_path: Path) -> Callable[[], ServerlessExecutor]:
        return lambda: SlurmExecutor(directory=str(tmp_path / "shared"), refresh_s=0.1)

    @pytest.fixture
    def outage(self, cluster: Cluster) -> AbstractContextManager[None]:
        return cluster.outage()

    def unknown(self, handle: ReplicaHandle) -> ReplicaHandle:
        metadata = {**handle.metadata, "job": "987654", "directory": "/nonexistent/0.0-00000000"}
        return ReplicaHandle(handle.rank, handle.backend_name, metadata)


class TestSlurm(OnSlurm, ExecutorContract):
    @pytest.fixture
    def cluster(self, truest_slurm: Cluster) -> Cluster:
        return truest_slurm


@pytest.mark.skipif(bool(daemons()), reason="the whole contract is put to the fake")
class TestFakeSlurm(OnSlurm, HandlesContract):
    @pytest.fixture
    def cluster(self, fake_slurm: Cluster) -> Cluster:
        return fake_slurm
