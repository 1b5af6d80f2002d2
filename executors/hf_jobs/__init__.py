"""Replicas as Hugging Face Jobs."""

from __future__ import annotations

from diloco_cloud.executors.hf_jobs.executor import HFJobsExecutor

__all__ = ["HFJobsExecutor"]
