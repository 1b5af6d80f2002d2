"""What SageMaker is asked for, judged by AWS's own model of its API; nothing is sent."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.aws_validation import validate
from sagemaker_fixtures import IMAGE, OUTPUT

from diloco_cloud.errors import ConfigError, UsageError
from diloco_cloud.executor import LaunchOptions, Script
from diloco_cloud.executors.sagemaker import SageMakerExecutor
from diloco_cloud.executors.sagemaker.clients import Clients, training_instances
from diloco_cloud.executors.sagemaker.instances import GPUS
from diloco_cloud.replica_entrypoint import _parser

ROLE = "arn:aws:iam::123456789012:role/replica"
RUN = "s3://bucket/runs/tale-x7k2p"
ARGUMENTS = {"rendezvous_uri": RUN, "spec_hash": "0" * 32}
SECRET = "canary-77aa"

Preview = Callable[..., list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and nothing of the machine's own AWS."""

    def refuse(*_args: object, **_named: object) -> None:
        raise AssertionError("a preview opened a socket")

    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setattr(socket.socket, "connect", refuse)


def _preview(
    settings: dict[str, Any] | None = None,
    n_replicas: int = 1,
    arguments: dict[str, Any] | None = None,
    *,
    entrypoint: Any = "diloco_cloud.replica_entrypoint",
    gpu: str | None = None,
    timeout: float = 3600,
    **options: Any,
) -> list[dict[str, Any]]:
    defaults = {"role": ROLE, "image": IMAGE, "region": "us-east-1"}
    executor = SageMakerExecutor(**{**defaults, **(settings or {})})
    found = executor.preview_launch(
        n_replicas,
        entrypoint,
        ARGUMENTS if arguments is None else arguments,
        gpu=gpu,
        timeout=timeout,
        options=LaunchOptions(**{"name": "tale-x7k2p", **options}),
    )
    for request in found:
        for key, value in request.items():
            service, _, operation = key.partition(":")
            if service == "sagemaker":
                validate(service, operation, value)
    return found


def _job(settings: dict[str, Any] | None = None, **launch: Any) -> dict[str, Any]:
    """The only job's request."""
    found = _preview(settings, **launch)
    (job,) = [r["sagemaker:CreateTrainingJob"] for r in found if "sagemaker:CreateTrainingJob" in r]
    return dict(job)


def test_request_carries_the_address_of_the_run_and_no_more() -> None:
    jobs = [r["sagemaker:CreateTrainingJob"] for r in _preview(n_replicas=3)]
    assert [job["TrainingJobName"] for job in jobs] == [f"tale-x7k2p-r{r}-a0" for r in range(3)]
    for rank, job in enumerate(jobs):
        assert job["Environment"]["REPLICA_RANK"] == str(rank)
        assert job["Environment"]["NUM_REPLICA_GROUPS"] == "3"
        assert job["Environment"]["DILOCO_TERM_GRACE_S"] == "120"
        assert job["ResourceConfig"]["InstanceCount"] == 1
        assert {tag["Key"]: tag["Value"] for tag in job["Tags"]} == {
            "diloco-run": "tale-x7k2p",
            "diloco-rank": str(rank),
            "diloco-attempt": "0",
        }
        assert job["OutputDataConfig"] == {"S3OutputPath": "s3://bucket/sagemaker/tale-x7k2p"}


def test_command_is_understood_by_the_entrypoint_itself() -> None:
    algorithm = _job()["AlgorithmSpecification"]
    assert algorithm["ContainerEntrypoint"] == ["python", "-m", "diloco_cloud.replica_entrypoint"]
    parsed = _parser().parse_args(algorithm["ContainerArguments"])
    assert (parsed.rendezvous_uri, parsed.spec_hash) == (RUN, "0" * 32)


def test_longest_address_of_a_run_fits() -> None:
    uri = f"s3://{'b' * 63}/{'p' * 180}"
    algorithm = _job(arguments={**ARGUMENTS, "rendezvous_uri": uri})["AlgorithmSpecification"]
    assert uri in algorithm["ContainerArguments"]


def test_arguments_of_any_function_are_cut_into_words() -> None:
    arguments = {"text": "ünïcode\n" * 500}
    job = _job(
        {"output_uri": OUTPUT},
        entrypoint="diloco_cloud.testing.programs:tell",
        arguments=arguments,
    )
    words = job["AlgorithmSpecification"]["ContainerArguments"]
    assert len(words) > 2
    assert json.loads("".join(words[1:])) == arguments


def test_restart_has_a_name_of_its_own_and_the_same_checkpoints() -> None:
    first = _job({"spot": True}, ranks=[2], world_size=4)
    again = _job({"spot": True}, ranks=[2], world_size=4, attempt=1)
    assert again["TrainingJobName"] == "tale-x7k2p-r2-a1"
    assert again["Environment"]["DILOCO_ATTEMPT"] == "1"
    assert again["CheckpointConfig"] == first["CheckpointConfig"]
    place = "s3://bucket/sagemaker/tale-x7k2p/checkpoints/0002"
    assert first["CheckpointConfig"] == {"S3Uri": place}


def test_spot_waits_for_capacity_besides_its_time_limit() -> None:
    job = _job({"spot": True, "spot_wait": 7200}, timeout=600)
    limits = {"MaxRuntimeInSeconds": 600, "MaxWaitTimeInSeconds": 7800}
    assert (job["EnableManagedSpotTraining"], job["StoppingCondition"]) == (True, limits)
    plain = _job(timeout=600)
    assert "EnableManagedSpotTraining" not in plain
    assert plain["StoppingCondition"] == {"MaxRuntimeInSeconds": 600}


def test_settings_reach_the_request() -> None:
    job = _job(
        {
            "keep_alive": 1800,
            "retries": 3,
            "volume_gb": 250,
            "subnets": "subnet-1,subnet-2",
            "security_groups": ["sg-1"],
            "tags": {"team": "a"},
            "output_uri": f"{OUTPUT}/",
            "request": {"ResourceConfig": {"VolumeKmsKeyId": "k"}, "EnableNetworkIsolation": False},
        }
    )
    assert job["ResourceConfig"] == {
        "InstanceType": "ml.g5.xlarge",
        "InstanceCount": 1,
        "VolumeSizeInGB": 250,
        "KeepAlivePeriodInSeconds": 1800,
        "VolumeKmsKeyId": "k",
    }
    assert job["RetryStrategy"] == {"MaximumRetryAttempts": 3}
    assert job["VpcConfig"] == {
        "Subnets": ["subnet-1", "subnet-2"],
        "SecurityGroupIds": ["sg-1"],
    }
    assert job["OutputDataConfig"] == {"S3OutputPath": f"{OUTPUT}/tale-x7k2p"}
    assert job["EnableNetworkIsolation"] is False
    assert {"Key": "team", "Value": "a"} in job["Tags"]


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_stands_for_an_instance_that_there_is(gpu: str) -> None:
    assert GPUS[gpu] in training_instances()
    assert _job(gpu=gpu)["ResourceConfig"]["InstanceType"] == GPUS[gpu]


def test_gpus_in_order_of_preference() -> None:
    resources = _job(gpu="h100:1, ml.g6e.2xlarge,H100")["ResourceConfig"]
    assert resources["InstancePreferences"] == [
        {"InstanceType": "ml.p5.4xlarge"},
        {"InstanceType": "ml.g6e.2xlarge"},
    ]
    assert "InstanceType" not in resources


def test_secrets_are_named_and_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    found = _preview(secrets=["HF_TOKEN"])
    assert SECRET not in json.dumps(found)
    assert found[0]["secretsmanager:CreateSecret"]["Name"] == "diloco-cloud/tale-x7k2p"
    job = found[1]["sagemaker:CreateTrainingJob"]
    assert job["Environment"]["DILOCO_SECRETS_AT"] == "us-east-1:diloco-cloud/tale-x7k2p"
    head = ["python", "-m", "diloco_cloud.executors.sagemaker.container"]
    assert job["AlgorithmSpecification"]["ContainerEntrypoint"] == head


def test_sources_are_uploaded_once_in_a_run(tmp_path: Path) -> None:
    (tmp_path / "pkg" / "__pycache__").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "env").mkdir()
    names = ("pkg/train.py", "pkg/__pycache__/train.pyc", ".git/config", ".env", "env/pyvenv.cfg")
    for name in names:
        (tmp_path / name).write_text("x = 1\n")
    upload, first = _preview({"source_dir": str(tmp_path)})
    assert upload["files"] == ["pkg/train.py"]
    assert upload["s3:PutObject"] == "s3://bucket/sagemaker/tale-x7k2p/source/"
    job = first["sagemaker:CreateTrainingJob"]
    (channel,) = job["InputDataConfig"]
    assert channel["DataSource"]["S3DataSource"]["S3Uri"] == upload["s3:PutObject"]
    assert job["Environment"]["PYTHONPATH"] == "/opt/ml/input/data/source"
    # On another machine, which has no such folder.
    (again,) = _preview({"source_dir": "/nonexistent"}, attempt=1)
    assert again["sagemaker:CreateTrainingJob"]["InputDataConfig"] == [channel]


BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no role": ({"role": None}, "role=arn:aws"),
    "a role's name": ({"role": "replica"}, "aws iam get-role"),
    "an image of Docker Hub": ({"image": "me/replica:1"}, "ECR"),
    "an image elsewhere": ({"image": IMAGE.replace("us-east-1", "eu-west-1")}, "region=eu-west-1"),
    "a misspelt instance": ({"instance_type": "ml.g5.xlrge"}, "ml.g5.xlarge"),
    "an unknown accelerator": ({"instance_type": "A100"}, "A100:8"),
    "warm spot": ({"spot": True, "keep_alive": 60}, "on-demand"),
    "too warm": ({"keep_alive": 30_000}, "21600"),
    "several spot types": ({"spot": True, "instance_type": "L4,T4"}, "leave spot out"),
    "half a VPC": ({"subnets": "subnet-1"}, "both"),
    "no number": ({"volume_gb": "100"}, "whole number"),
    "no truth": ({"spot": "yes"}, "true or false"),
    "no bucket": ({"output_uri": "bucket/prefix"}, "s3://bucket/prefix"),
    "no text": ({"image": 7}, "text"),
    "no folder": ({"source_dir": "/nonexistent"}, "folder"),
    "a tag too many": ({"tags": {f"t{i}": "v" for i in range(60)}}, "50"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_setting_is_refused_with_a_fix(case: str) -> None:
    settings, fix = BAD_SETTINGS[case]
    with pytest.raises(ConfigError) as caught:
        _preview(settings)
    assert fix in str(caught.value.fix)


BAD_LAUNCHES: dict[str, tuple[dict[str, Any], str]] = {
    "a month": ({"timeout": 29 * 86_400}, "28 days"),
    "a long name": ({"name": "x" * 49}, "48 characters"),
    "an odd name": ({"name": "tale_1"}, "dashes"),
    "a long variable": ({"env": {"A": "x" * 513}}, "512"),
    "many variables": ({"env": {f"A{i}": "1" for i in range(101)}}, "100"),
    "an odd variable": ({"env": {"A-B": "1"}}, "underscores"),
    "a long argument": (
        {
            "settings": {"output_uri": OUTPUT},
            "entrypoint": "diloco_cloud.testing.programs:tell",
            "arguments": {"a": "x" * 30_000},
        },
        "file",
    ),
    "an unknown GPU": ({"gpu": "H900"}, "H100"),
    "no store in Amazon's cloud": (
        {"arguments": {"rendezvous_uri": "gs://bucket/run", "spec_hash": "0"}},
        "output_uri",
    ),
    "a store behind another endpoint": (
        {"env": {"AWS_ENDPOINT_URL_S3": "https://r2.example"}},
        "output_uri",
    ),
}


@pytest.mark.parametrize("case", BAD_LAUNCHES)
def test_bad_launch_is_refused_with_a_fix(case: str) -> None:
    launch, fix = BAD_LAUNCHES[case]
    with pytest.raises(ConfigError) as caught:
        _preview(**launch)
    assert fix in str(caught.value.fix)


def test_script_of_this_machine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(UsageError, match="not in the container"):
        _preview(entrypoint=Script(str(tmp_path / "train.py")), arguments={})


def test_region_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="region"):
        _preview({"region": None})
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert _job({"region": None})["Environment"]["AWS_DEFAULT_REGION"] == "us-east-1"


def test_profile_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="nobody") as caught:
        _preview({"region": None, "profile": "nobody"})
    assert "aws configure" in str(caught.value.fix)


def test_sources_go_to_amazon_wherever_the_store_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://account.r2.example")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    client = Clients().get("s3", "us-east-1")
    assert client.meta.endpoint_url.endswith(".amazonaws.com")
