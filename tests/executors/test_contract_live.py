"""``pytest --backend NAME --live tests/executors/test_contract_live.py``, with an account there."""

from __future__ import annotations

from diloco_cloud.testing.live import TestLive

__all__ = ["TestLive"]
