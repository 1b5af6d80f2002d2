"""Exports are what Kubernetes and SkyPilot take: judged by their own schemas."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError

from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import LaunchOptions
from diloco_cloud.exports import kubernetes_job, skypilot_task, to_yaml
from diloco_cloud.exports.skypilot import launch_commands
from diloco_cloud.launch_request import LaunchRequest, check_launch
from diloco_cloud.replica_entrypoint import _parser

#: Of Kubernetes 1.37 (batch/v1 Job, strict; kinds of volumes and probes, which we have none of,
#: taken out), and of SkyPilot 0.14.1 (``get_task_schema`` with ``get_resources_schema``).
SCHEMAS = Path(__file__).with_name("schemas")
URI = "s3://bucket/runs/run-1"
COMMON: dict[str, Any] = {"name": "run-1", "image": "registry/image:1", "timeout": 3600.5}


def _request(replicas: int = 3, **env: str) -> LaunchRequest:
    return check_launch(
        replicas,
        "diloco_cloud.replica_entrypoint",
        {"rendezvous_uri": URI, "spec_hash": "1f" * 16},
        LaunchOptions(name="run-1", env=env),
        timeout=3600,
    )


def _validate(document: dict[str, Any], schema: str) -> None:
    Draft202012Validator(json.loads((SCHEMAS / schema).read_text())).validate(document)


def _job(**options: Any) -> dict[str, Any]:
    return kubernetes_job(_request(ODD="a: 'b' #c"), **{**COMMON, "restarts": 3, **options})


def _task(**options: Any) -> dict[str, Any]:
    return skypilot_task(_request(ODD="a: 'b' #c"), **{**COMMON, "restarts": 3, **options})


KUBERNETES_OPTIONS: list[dict[str, Any]] = [
    {},
    {"gpu": "2", "cpus": 7.5, "memory": "64Gi", "restarts": 0},
    {"gpu": "amd.com/gpu:1", "namespace": "lab", "service_account": "replica"},
    {"secrets": ["HF_TOKEN"], "secret_name": "mine", "node_selector": {"a.b/c": "d"}},
]
SKYPILOT_OPTIONS: list[dict[str, Any]] = [
    {},
    {"gpu": "H100:8", "cpus": 7.5, "memory": "64GB", "restarts": 0},
    {"gpu": "A100", "infra": "aws/us-east-1", "spot": True, "secrets": ["HF_TOKEN"]},
]


@pytest.mark.parametrize("options", KUBERNETES_OPTIONS)
def test_kubernetes_job_is_valid_and_survives_yaml(options: dict[str, Any]) -> None:
    document = _job(**options)
    _validate(document, "kubernetes-1.37.0-job.json")
    assert yaml.safe_load(to_yaml(document)) == document


@pytest.mark.parametrize("options", SKYPILOT_OPTIONS)
def test_skypilot_task_is_valid_and_survives_yaml(options: dict[str, Any]) -> None:
    document = _task(**options)
    _validate(document, "skypilot-0.14.1-task.json")
    assert yaml.safe_load(to_yaml(document)) == document


def test_schemas_do_refuse() -> None:
    job, task = _job(), _task()
    del job["spec"]["podFailurePolicy"]["rules"][0]["onPodConditions"][0]["type"]
    task["resources"]["gpus"] = 1
    for document, schema in (
        (job, "kubernetes-1.37.0-job.json"),
        (task, "skypilot-0.14.1-task.json"),
    ):
        with pytest.raises(ValidationError):
            _validate(document, schema)


def test_kubernetes_pods_are_told_who_they_are() -> None:
    pod = _job(secrets=["HF_TOKEN"])["spec"]["template"]["spec"]
    container = pod["containers"][0]
    variables = {variable["name"]: variable for variable in container["env"]}
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    for name in ("REPLICA_RANK", "REPLICA_GROUP_ID"):
        assert variables[name]["valueFrom"]["fieldRef"]["fieldPath"] == index
    assert variables["NUM_REPLICA_GROUPS"]["value"] == "3"
    assert variables["ODD"]["value"] == "a: 'b' #c"
    assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {
        "name": "run-1",
        "key": "HF_TOKEN",
    }
    assert (pod["activeDeadlineSeconds"], pod["terminationGracePeriodSeconds"]) == (3601, 60)


def test_kubernetes_command_is_read_by_the_replicas_own_parser() -> None:
    command = _job()["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:3] == ["python", "-m", "diloco_cloud.replica_entrypoint"]
    read = _parser().parse_args(command[3:])
    assert (read.rendezvous_uri, read.spec_hash, read.world_size) == (URI, "1f" * 16, 3)


def test_skypilot_command_runs_with_the_rank_of_its_job(tmp_path: Path) -> None:
    """Its script, run with a program in Python's place that tells what it was given."""
    told = tmp_path / "python"
    told.write_text('#!/bin/sh\necho "$REPLICA_RANK $REPLICA_GROUP_ID $NUM_REPLICA_GROUPS" "$@"\n')
    told.chmod(0o755)
    task = _task()
    assert task["envs"]["REPLICA_RANK"] is None
    env = {**{k: v for k, v in task["envs"].items() if v}, "REPLICA_RANK": "2"}
    done = subprocess.run(
        ["sh", "-c", task["run"]],
        env={**env, "PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    words = shlex.split(done.stdout)
    assert words[:3] == ["2", "2", "3"]
    assert _parser().parse_args(words[5:]).rendezvous_uri == URI


def test_skypilot_jobs_are_launched_by_rank(tmp_path: Path) -> None:
    sky = tmp_path / "sky"
    sky.write_text('#!/bin/sh\necho "$@"\n')
    sky.chmod(0o755)
    commands = launch_commands("run-1", range(2), ["HF_TOKEN"], "a b.yaml")
    done = subprocess.run(
        ["sh", "-c", commands],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stdout.splitlines() == [
        f"jobs launch -y -d -n run-1-{rank} --env REPLICA_RANK={rank} --secret HF_TOKEN a b.yaml"
        for rank in range(2)
    ]


@pytest.mark.parametrize("gpu", ["a100", "0", "", "a100:1", "-1", "nvidia.com/gpu"])
def test_gpu_that_kubernetes_cannot_be_asked_for_is_refused(gpu: str) -> None:
    with pytest.raises(ConfigError, match="number of GPUs"):
        _job(gpu=gpu)


@pytest.mark.parametrize("gpu", ["1", "", "A100:0", "A100 2"])
def test_gpu_that_skypilot_cannot_be_asked_for_is_refused(gpu: str) -> None:
    with pytest.raises(ConfigError, match="is not a GPU"):
        _task(gpu=gpu)


#: Strings that YAML might take for something else.
STRINGS = [
    *("", " ", "a", "yes", "No", "null", "~", "1", "1e3", "a: b", "#", "- a", "2026-11-20", "0x1f"),
    *("a\n", "a\nb", "a\nb\n", "\na\nb", " a\nb", "a\n\nb", "a\n\n", "a\tb\nc", "\t", "ünï 🙂"),
    *("a\\b", '"', "'", ".5", "[x]", "{x}", "*x", "&x", "!x", "%x", "@x", "`x`", "x:", "x #y"),
    *("=", "<<", "a\r\nb", "a\n b\n", "a \n", "\u2028x\ny"),
]


@pytest.mark.parametrize("value", STRINGS)
def test_yaml_says_what_was_meant(value: str) -> None:
    document = {"key": value, "list": [value, {"inner": value}, []], value: {}, "n": None}
    assert yaml.safe_load(to_yaml(document)) == document


def test_no_secret_value_is_in_any_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary")
    for document in (_job(secrets=["HF_TOKEN"]), _task(secrets=["HF_TOKEN"])):
        assert not re.search("canary", to_yaml(document))
