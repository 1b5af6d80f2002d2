"""The contract suite on a real provider; see :mod:`diloco_cloud.testing.plugin`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest

from diloco_cloud.executor import ServerlessExecutor
from diloco_cloud.testing.contract import ExecutorContract


class TestLive(ExecutorContract):
    """Whatever ``--backend`` names, by this machine's credentials."""

    patience_s: ClassVar[float] = 1800.0  # a provider may have to find a machine first
    pause_s: ClassVar[float] = 2.0
    shortest_timeout_s: ClassVar[int] = 120
    returns_results: ClassVar[bool | None] = None
    knows_exit_codes: ClassVar[bool] = False

    @pytest.fixture(autouse=True)
    def _gpu(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(self), "gpu", request.config.getoption("--backend-gpu"))

    @pytest.fixture
    def make_executor(
        self, live_executor: Callable[[], ServerlessExecutor]
    ) -> Callable[[], ServerlessExecutor]:
        return live_executor
