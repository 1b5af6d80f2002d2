"""Finding CUDA devices without torch, by a stand-in for the driver's tool on the PATH."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_cloud.executors.local import environment
from diloco_cloud.executors.local.environment import cuda_devices, replica_environment

LISTING = """GPU 0: NVIDIA H200 (UUID: GPU-1)
  MIG 1g.18gb     Device  0: (UUID: MIG-1)
GPU 1: NVIDIA H200 (UUID: GPU-2)
"""


@pytest.fixture(autouse=True)
def _forget_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    environment._installed_devices.cache_clear()
    yield
    environment._installed_devices.cache_clear()


def install_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_devices_are_listed_by_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, f"cat <<'END'\n{LISTING}END")
    assert cuda_devices() == ("0", "1")


def test_broken_driver_means_no_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, "echo GPU 0: stale; exit 9")
    assert cuda_devices() == ()


def test_no_driver_means_no_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cuda_devices() == ()


def test_visible_devices_win_over_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7, 2,")
    assert cuda_devices() == ("GPU-7", "2")


def test_added_variables_override_everything() -> None:
    inherited = {"OMP_NUM_THREADS": "8", "A": "inherited", "LOCAL_RANK": "3"}
    added = {"CUDA_VISIBLE_DEVICES": "5", "A": "added"}
    result = replica_environment(inherited, added, rank=1, cpu_threads=1, devices=("0", "1"))
    assert result["OMP_NUM_THREADS"] == "8"
    assert result["CUDA_VISIBLE_DEVICES"] == "5"
    assert result["A"] == "added"
    assert "LOCAL_RANK" not in result
