"""Replicas as Amazon SageMaker training jobs, one single-instance job each."""

from __future__ import annotations

from diloco_cloud.executors.sagemaker.executor import SageMakerExecutor

__all__ = ["SageMakerExecutor"]
