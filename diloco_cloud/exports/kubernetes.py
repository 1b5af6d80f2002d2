"""A Kubernetes Indexed Job: one pod per replica, whose completion index is its rank."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import TERM_GRACE_ENV
from diloco_cloud.launch_request import LaunchRequest
from diloco_cloud.replica_command import replica_command

#: Where the downward API has a pod's index.
_INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_GPUS: Final = re.compile(r"(?:(?P<resource>[\w.-]+/[\w.-]+):)?(?P<n>[1-9]\d*)")
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


def kubernetes_job(
    request: LaunchRequest,
    *,
    name: str,
    image: str,
    timeout: float,
    restarts: int,
    gpu: str | None = None,
    secrets: Sequence[str] = (),
    secret_name: str | None = None,
    namespace: str | None = None,
    service_account: str | None = None,
    cpus: float | None = None,
    memory: str | None = None,
    node_selector: Mapping[str, str] = _NOTHING,
    grace: float = 60.0,
) -> dict[str, Any]:
    """The manifest of a run's replicas, for Kubernetes 1.33 and later (``backoffLimitPerIndex``).

    Args:
        request: a launch of all ranks, that has been checked.
        name: of the run, and of the Job.
        image: with diloco-cloud installed.
        timeout: seconds one pod may run.
        restarts: pods of one rank that may fail; those that were preempted do not count.
        gpu: how many, such as "1", or with the resource's name: "amd.com/gpu:1".
        secrets: names of variables that come from a Secret.
        secret_name: of that Secret; default: ``name``.
        namespace: default: the cluster's.
        service_account: default: the namespace's.
        cpus: that each pod asks for.
        memory: that each pod asks for, such as "64Gi".
        node_selector: labels of nodes.
        grace: seconds between SIGTERM and SIGKILL.

    Raises:
        ConfigError: GPUs that Kubernetes could not be asked for.
    """
    labels = {"app.kubernetes.io/name": "diloco-cloud", "app.kubernetes.io/instance": name}
    container = {
        "name": "replica",
        "image": image,
        "command": replica_command(request),
        "env": [
            *_variables(request, grace),
            *(_secret_variable(variable, secret_name or name) for variable in secrets),
        ],
        "resources": _resources(gpu, cpus, memory),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    pod = {
        "restartPolicy": "Never",  # which a podFailurePolicy requires
        "terminationGracePeriodSeconds": math.ceil(grace),
        "activeDeadlineSeconds": math.ceil(timeout),
        **({"serviceAccountName": service_account} if service_account else {}),
        **({"nodeSelector": dict(node_selector)} if node_selector else {}),
        "containers": [container],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            **({"namespace": namespace} if namespace else {}),
            "labels": labels,
        },
        "spec": {
            "completionMode": "Indexed",
            "completions": len(request.ranks),
            "parallelism": len(request.ranks),
            # One rank that fails for good ends no other.
            "backoffLimitPerIndex": restarts,
            "maxFailedIndexes": len(request.ranks),
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    }
                ]
            },
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _variables(request: LaunchRequest, grace: float) -> list[dict[str, Any]]:
    environment, other = request.environment(0), request.environment(1)
    variables: list[dict[str, Any]] = [{"name": TERM_GRACE_ENV, "value": f"{grace:g}"}]
    for name, value in environment.items():
        if value == other[name]:
            variables.append({"name": name, "value": value})
        else:
            rank = {"fieldRef": {"fieldPath": _INDEX}}
            variables.append({"name": name, "valueFrom": rank})
    return variables


def _secret_variable(name: str, secret: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}}


def _resources(gpu: str | None, cpus: float | None, memory: str | None) -> dict[str, Any]:
    asked = {
        **({"cpu": f"{cpus:g}"} if cpus is not None else {}),
        **({"memory": memory} if memory is not None else {}),
    }
    found: dict[str, Any] = {"requests": asked} if asked else {}
    if gpu is not None:
        match = _GPUS.fullmatch(gpu)
        if match is None:
            raise ConfigError(
                f"{gpu!r} is not a number of GPUs, which is what Kubernetes can be asked for",
                fix="Write --gpu 1, and choose their kind by --node-selector LABEL=VALUE.",
            )
        found["limits"] = {match["resource"] or "nvidia.com/gpu": match["n"]}
    return found
