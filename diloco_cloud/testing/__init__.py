"""What an executor must do, as tests that any executor can be put to.

A package that adds a backend subclasses :class:`ExecutorContract` in its own tests::

    import pytest
    from diloco_cloud.testing import ExecutorContract
    from my_package import MyCloudExecutor

    class TestMyCloud(ExecutorContract):
        @pytest.fixture
        def make_executor(self):
            return MyCloudExecutor

With an account and ``-p diloco_cloud.testing.plugin``, the same suite runs against the real
provider: ``pytest --pyargs diloco_cloud.testing.live --backend my-cloud --live``. pytest is needed
by this package alone, and imported when a name of it is first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from diloco_cloud.errors import MissingDependencyError

if TYPE_CHECKING:
    from diloco_cloud.testing.contract import ExecutorContract
    from diloco_cloud.testing.fleet import Fleet

__all__ = ["ExecutorContract", "Fleet"]

_HOMES = {"ExecutorContract": "contract", "Fleet": "fleet"}
_WITH_ASSERTIONS = (
    *("contract", "contract_base", "contract_launching", "contract_ending"),
    *("contract_handles", "contract_output", "fleet"),
)

_pytest = sys.modules.get("pytest")
if _pytest is not None:  # its explanations of failed assertions, in modules of this package too
    _pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in _WITH_ASSERTIONS))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        raise MissingDependencyError(
            "the contract suite needs pytest, which is not installed", fix="pip install pytest"
        ) from error
