"""Orchestrators that start a run's replicas themselves: they are asked by their own commands."""

from __future__ import annotations

from typing import Final

#: By the name of the backend that a run's record has: what stops the replicas of a run.
STOP_COMMANDS: Final = {
    "kubernetes": "kubectl delete job {run_id}",
    "skypilot": "sky jobs cancel -n {run_id}-RANK",
}
