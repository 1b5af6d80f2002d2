"""Train functions that the entrypoint's tests name by module and function."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch


def echo(*, manager: Any, rank: int, world_size: int, **kwargs: Any) -> dict[str, Any]:
    return {"rank": rank, "world_size": world_size, "step": manager.current_step(), **kwargs}


def narrow(*, manager: Any, rank: int, world_size: int, sync_every: int, own: str) -> list[Any]:
    return [rank, world_size, sync_every, own]


def average(*, manager: Any, rank: int, world_size: int) -> float:
    manager.start_quorum()
    tensor = torch.tensor([float(rank)])
    manager.report(tokens=5, loss=0.5, accuracy=0.25)
    manager.allreduce(tensor).wait()
    manager.should_commit()
    return float(tensor)


def talk(*, manager: Any, rank: int, world_size: int) -> None:
    print("printed")  # noqa: T201
    logging.getLogger("mine").info("logged %s", "line")
    warnings.warn("careful", stacklevel=1)


def crash(*, manager: Any, rank: int, world_size: int) -> None:
    raise ValueError("the model exploded\nsecond line")


not_callable = 3
