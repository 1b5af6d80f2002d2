"""Replicas as detached processes of this machine."""

from __future__ import annotations

from diloco_cloud.executors.local.executor import LocalProcessExecutor

__all__ = ["LocalProcessExecutor"]
