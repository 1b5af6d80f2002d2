from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_cloud.executors.local import LocalProcessExecutor
from diloco_cloud.executors.local.runner import is_alive


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def local(state_dir: Path) -> Iterator[LocalProcessExecutor]:
    """An executor whose replicas do not outlive the test."""
    executor = LocalProcessExecutor(state_dir=state_dir, grace=0.3)
    yield executor
    for launch in {path.name.rpartition("-")[0] for path in state_dir.glob("*")}:
        for handle in executor.recover(launch):
            found = handle.metadata
            for pid, token in (
                (found["runner_pid"], found["runner_start"]),
                (found["pid"], found["pid_start"]),
            ):
                if is_alive(pid, token):
                    os.kill(pid, signal.SIGKILL)
