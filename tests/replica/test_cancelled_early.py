"""A replica that was cancelled while it waited for a machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from replica_process import STARTED_S, ReplicaProcess, python_path

from diloco_cloud import keys


def test_a_replica_that_was_cancelled_before_it_began_does_not_train(tmp_path: Path) -> None:
    first = ReplicaProcess(tmp_path, "steps", module="trainers_that_end")
    try:
        first.store.create(keys.cancel(0, 1), b"{}")
        again = subprocess.run(
            [sys.executable, "-m", "diloco_cloud.replica_entrypoint", *first.flags],
            env={
                **os.environ,
                "PYTHONPATH": python_path(),
                "REPLICA_RANK": "0",
                "DILOCO_ATTEMPT": "1",
            },
            timeout=STARTED_S,
            check=False,
        )
    finally:
        first.close()
    assert again.returncode == 143
    outcome = first.store.get(keys.outcome(0, 1)).decode()
    assert '"cancelled"' in outcome
