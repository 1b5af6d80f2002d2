"""One replica of a composer run, in this process."""

from __future__ import annotations

from typing import Any

import torch

from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.outer import MockManager
from diloco_cloud.trainers.composer import train

SETTINGS: dict[str, Any] = {
    "model": "tiny",
    "task": "arithmetic",
    "task_args": {"hints": True},
    "rows": 16,
    "sync_every": 2,
    "rounds": 2,
    "learning_rate": 1e-3,
    "batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 4,
    "logging_steps": 1,
    "sdpo_wrapper": "taid",
    "taid": {"t_start": 0.2, "t_end": 0.8},
}
#: Of a run that is about something else than TAID, as short as can be.
ONE_STEP: dict[str, Any] = {"sync_every": 1, "rounds": 1, "sdpo_wrapper": "none", "taid": None}


def replica(
    where: str,
    rank: int,
    world_size: int,
    attempt: int = 0,
    init_from: str | None = None,
    **changes: Any,
) -> dict[str, Any]:
    torch.set_num_threads(1)
    door = ObjectStoreAllReduce(
        f"{where}/run", rank, world_size, attempt=attempt, timeout_s=120, poll_interval_s=0.02
    )
    manager = MockManager(door, init_from=init_from)
    try:
        result = train(manager=manager, rank=rank, world_size=world_size, **{**SETTINGS, **changes})
    except BaseException:
        manager.shutdown()
        raise
    manager.shutdown(finished=True)
    return {
        **result,
        "digest": manager.global_digest(),
        "outer_steps": manager.current_step(),
        "metrics": manager.progress.metrics,
    }
