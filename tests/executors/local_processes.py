"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from diloco_cloud.executors.local.runner import start_token

PATIENCE = 30.0


def wait_until(condition: Callable[[], object]) -> None:
    """Return when ``condition`` holds; fail the test if it never does."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def wait_for_pid(path: Path) -> int:
    """The pid that a process writes to ``path``."""
    wait_until(path.exists)
    return int(path.read_text())


def wait_for_end(pid: int) -> None:
    wait_until(lambda: start_token(pid) is None)
