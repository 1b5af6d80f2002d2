"""Replicas as tasks of a Slurm job array."""

from __future__ import annotations

from diloco_cloud.executors.slurm.executor import SlurmExecutor

__all__ = ["SlurmExecutor"]
