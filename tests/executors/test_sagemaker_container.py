"""What happens in the container before the replica: its preparation, and its secrets."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.aws_server import FakeAws
from sagemaker_fixtures import IMAGE, MakeExecutor, aws, make_executor
from servers import S3Server

from diloco_cloud.errors import ConfigError, MissingDependencyError
from diloco_cloud.executor import LaunchOptions
from diloco_cloud.executors.sagemaker import dlc, planning

__all__ = ["aws", "make_executor"]

CONTAINER = "diloco_cloud.executors.sagemaker.container"
HAS_SDK = importlib.util.find_spec("sagemaker") is not None


def _run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", CONTAINER, *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_command_takes_the_place_of_the_process() -> None:
    done = _run("sh", "-c", 'echo "$0" $PPID; exit 7', "a  b")
    assert (done.returncode, done.stdout) == (7, f"a  b {os.getpid()}\n")


def test_command_that_is_missing_is_told() -> None:
    assert _run().returncode == 2
    done = _run("no-such-program")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no-such-program" in done.stderr


def test_secrets_are_in_the_environment_of_the_command_alone(aws: FakeAws) -> None:
    aws.secrets.values["diloco-cloud/tale"] = '{"HF_TOKEN": "canary"}'
    place = {"DILOCO_SECRETS_AT": "us-east-1:diloco-cloud/tale"}
    assert _run("sh", "-c", "echo $HF_TOKEN", **place).stdout == "canary\n"
    done = _run("true", DILOCO_SECRETS_AT="us-east-1:diloco-cloud/other")
    assert done.returncode == 1
    assert "secretsmanager:GetSecretValue" in done.stderr
    assert "canary" not in done.stdout + done.stderr


@pytest.mark.parametrize("requirements", [None, "click>=8\n"])
def test_container_of_aws_is_prepared_and_runs_the_sources(
    aws: FakeAws,
    s3_server: S3Server,
    make_executor: MakeExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    requirements: str | None,
) -> None:
    """Its line of shell runs for real; all that it installs is there already."""
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(planning, "deep_learning_image", lambda *_: IMAGE)  # by the SDK
    (tmp_path / "my_own.py").write_text("def main(name):\n    print('hello', name)\n")
    if requirements is not None:
        (tmp_path / "requirements.txt").write_text(requirements)
    monkeypatch.syspath_prepend(str(tmp_path))
    executor = make_executor(
        image=None,
        source_dir=str(tmp_path),
        output_uri=f"s3://{s3_server.bucket}/sources-{os.getpid()}",
        package="diloco-cloud",
    )
    options = LaunchOptions(name="tale")
    (handle,) = executor.launch_replicas(1, "my_own", {"name": "you"}, options=options)
    (result,) = executor.collect([handle], timeout=200)
    assert result["status"] == "succeeded", executor.stream_logs(handle)
    assert executor.stream_logs(handle).splitlines()[-1] == "hello you"


@pytest.mark.skipif(HAS_SDK, reason="the SageMaker SDK is installed")
def test_launch_without_an_image_needs_the_sdk(aws: FakeAws, make_executor: MakeExecutor) -> None:
    with pytest.raises(MissingDependencyError) as caught:
        make_executor(image=None).preview_launch(1, "diloco_cloud.testing.programs:sleep", {})
    assert "diloco-cloud[sagemaker-sdk]" in str(caught.value.fix)


@pytest.mark.skipif(not HAS_SDK, reason="needs the SageMaker SDK (1 GB)")
def test_sdk_knows_the_addresses_of_aws_containers() -> None:
    gpu = dlc.deep_learning_image("2.10", "eu-central-1", "ml.g5.xlarge")
    cpu = dlc.deep_learning_image("2.10", "eu-central-1", "ml.m5.xlarge")
    assert gpu.startswith("763104351884.dkr.ecr.eu-central-1.amazonaws.com/pytorch-training:2.10")
    assert ("-gpu-" in gpu, "-cpu-" in cpu) == (True, True)
    with pytest.raises(ConfigError, match=r"PyTorch 9\.9"):
        dlc.deep_learning_image("9.9", "eu-central-1", "ml.g5.xlarge")
