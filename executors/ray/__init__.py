"""Replicas as jobs of a Ray cluster."""

from __future__ import annotations

from diloco_cloud.executors.ray.executor import RayJobsExecutor

__all__ = ["RayJobsExecutor"]
