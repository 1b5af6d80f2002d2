"""Train one model on many unrelated GPUs that meet only in an object-store bucket.

Importing the package is cheap: torch, torchft and every SDK load when a name that needs them is
first used.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "MockManager": "outer.manager",
    "ObjectStoreAllReduce": "exchange.allreduce",
    "ReplicaHandle": "executor",
    "ReplicaStatus": "executor",
    "Run": "run",
    "RunSpec": "run.spec",
    "ServerlessExecutor": "executor",
    "Side": "run.fleet",
    "launch": "run",
    "make_diloco_outer_loop": "outer",
    "open_store": "store",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "_DILOCO_AVAILABLE":
        return importlib.util.find_spec("torchft") is not None
    if name == "make_diloco_outer_loop" and not __getattr__("_DILOCO_AVAILABLE"):
        return None
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
