"""Replicas as calls of a Modal function."""

from __future__ import annotations

from diloco_cloud.executors.modal.executor import ModalExecutor

__all__ = ["ModalExecutor"]
