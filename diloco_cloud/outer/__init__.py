"""The DiLoCo outer loop: torchft's algorithm, met through an object store.

The module-level names below are None where torchft is not installed; ``make_diloco_outer_loop``
then says what to install.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "DiLoCoCallback": "callback",
    "HandedOver": "hand_over",
    "MockManager": "manager",
    "OuterLoop": "loop",
    "OuterSGD": "sgd",
    "_ImmediateWork": "work",
    "make_diloco_outer_loop": "make",
}
_TORCHFT = {
    "DiLoCo": "torchft.local_sgd",
    "Manager": "torchft.manager",
    "_DummyWork": "torchft.work",
}

__all__ = [
    "DiLoCoCallback",
    "HandedOver",
    "MockManager",
    "OuterLoop",
    "OuterSGD",
    "_ImmediateWork",
    "make_diloco_outer_loop",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in _TORCHFT:
        try:
            return getattr(importlib.import_module(_TORCHFT[name]), name)
        except ImportError:
            return None
    if name == "_TORCHFT_AVAILABLE":
        return __getattr__("DiLoCo") is not None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
