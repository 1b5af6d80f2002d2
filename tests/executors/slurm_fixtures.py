"""Fixtures of the Slurm backend's tests: clusters, and executors that use them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.slurm_cluster import Cluster, FakeCluster, RealCluster, daemons


@pytest.fixture(scope="session")
def real_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    """A real cluster of one node, where Slurm is installed."""
    missing = daemons()
    if missing:
        names = ", ".join(missing)
        pytest.skip(f"no {names} on this machine (Debian: slurmctld slurmd slurm-client)")
    cluster = RealCluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """Commands that act a cluster, first on PATH."""
    root = tmp_path / "slurm"
    root.mkdir()
    cluster = FakeCluster(root)
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    yield cluster
    cluster.stop()


@pytest.fixture(params=["fake", "real"])
def slurm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Either, with this process's environment set for it."""
    return _cluster(request.param, request, monkeypatch)


@pytest.fixture
def truest_slurm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The real one where Slurm is installed, else the fake: for tests that take long."""
    return _cluster("fake" if daemons() else "real", request, monkeypatch)


def _cluster(kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    if kind == "fake":
        fake: FakeCluster = request.getfixturevalue("fake_slurm")
        return fake
    real: RealCluster = request.getfixturevalue("real_slurm")
    for name, value in real.env.items():
        monkeypatch.setenv(name, value)
    return real
