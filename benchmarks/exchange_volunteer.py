"""One volunteer reducer of a measurement, in a process of its own, near the store."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

import torch
from exchange_replica import Job, die_with_parent

from diloco_cloud.store import open_store, run_name


def volunteer(job: Job, index: int, parent: Connection) -> None:
    """Serve the rounds of a job until the parent hangs up; its line to the store is not shaped."""
    from diloco_cloud.exchange.volunteer import Volunteer

    die_with_parent()
    os.environ.update(job.near)
    torch.set_num_threads(1)
    Volunteer(open_store(job.uri), run_name(f"{job.uri}/"), index).work(parent.poll)
