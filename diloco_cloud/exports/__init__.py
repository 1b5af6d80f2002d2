"""A run's replicas in the words of orchestrators that start them themselves.

Each is a pure function of a checked launch: no cluster is asked, and nothing is sent.
"""

from __future__ import annotations

from diloco_cloud.exports.kubernetes import kubernetes_job
from diloco_cloud.exports.skypilot import skypilot_task
from diloco_cloud.exports.yaml_text import to_yaml

__all__ = ["kubernetes_job", "skypilot_task", "to_yaml"]
