"""Many replicas in one process: they agree, and ask of the store what was predicted."""

from __future__ import annotations

import benchmark_modules  # noqa: F401  (makes the next imports possible)
import pytest
from many_replicas import Case, simulate


@pytest.mark.parametrize("case", [Case("raw", "sharded", 32), Case("sparse", "all-gather", 1)])
def test_many_replicas_agree_and_ask_for_no_more_than_predicted(case: Case) -> None:
    found = simulate(case, replicas=32, numel=32 * 1024)
    for method in ("create", "get_range"):
        # Once more for whoever decides, and where something was made twice.
        assert found.most(method) <= 1.1 * found.predicted.requests[method] + 4
    assert found.most("get") <= 2
