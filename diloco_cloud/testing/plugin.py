"""The pytest options with which the contract suite runs against a real provider.

``pytest -p diloco_cloud.testing.plugin --pyargs diloco_cloud.testing.live --backend modal --live``
launches real replicas with the credentials of this machine, and costs what some forty short ones
cost. Without ``--live`` those tests are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from diloco_cloud.executor import ServerlessExecutor
from diloco_cloud.executor_registry import get_executor


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("diloco-cloud", "the contract suite on a real provider")
    group.addoption("--backend", metavar="NAME", help="Whose executor to test.")
    group.addoption(
        "--backend-arg",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="A setting of it; may be repeated.",
    )
    group.addoption("--backend-gpu", metavar="GPU", help="To ask for in every launch.")
    group.addoption(
        "--live", action="store_true", help="Really launch replicas there, which costs money."
    )


@pytest.fixture
def live_executor(request: pytest.FixtureRequest) -> Callable[[], ServerlessExecutor]:
    """Makes executors of the backend that was named."""
    backend = request.config.getoption("--backend")
    if not request.config.getoption("--live"):
        pytest.skip("needs --live, and an account")
    if backend is None:
        raise pytest.UsageError("--live needs --backend NAME")
    settings = dict(_assignment(text) for text in request.config.getoption("--backend-arg"))
    return lambda: get_executor(backend, **settings)


def _assignment(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise pytest.UsageError(f"--backend-arg {text!r} has no '='")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
