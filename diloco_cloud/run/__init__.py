"""A run as its bucket tells it: launch it, follow it, end it, from any machine.

    run = launch(RunSpec(run_id="try-1", replicas=4, rounds=20), "./runs")
    run.wait()
    print(run.results().digest)

Nothing here imports torch: what replicas compute is none of this package's business.
"""

from __future__ import annotations

from diloco_cloud.run.fleet import Side
from diloco_cloud.run.launcher import launch
from diloco_cloud.run.names import new_run_id
from diloco_cloud.run.run import Run, list_runs
from diloco_cloud.run.spec import RunSpec

__all__ = ["Run", "RunSpec", "Side", "launch", "list_runs", "new_run_id"]
