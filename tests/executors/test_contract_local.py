"""The local executor keeps the contract that all executors share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from diloco_cloud.executor import ServerlessExecutor
from diloco_cloud.executors.local import LocalProcessExecutor
from diloco_cloud.testing import ExecutorContract


class TestLocal(ExecutorContract):
    returns_results: ClassVar[bool | None] = True

    @pytest.fixture
    def make_executor(self, tmp_path: Path) -> Callable[[], ServerlessExecutor]:
        return lambda: LocalProcessExecutor(state_dir=tmp_path / "state", grace=0.3)
