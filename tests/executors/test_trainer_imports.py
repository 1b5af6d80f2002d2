"""A trainer of the user's own gets to where it is imported, or the launch is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from diloco_cloud.cli.main import cli
from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import LaunchOptions, PreviewsLaunch
from diloco_cloud.executor_registry import get_executor
from diloco_cloud.run.spec import RunSpec
from diloco_cloud.run.start import build_request

ROLE = "arn:aws:iam::123456789012:role/replicas"
SAGEMAKER = {"role": ROLE, "region": "us-east-1"}
ECR = "123456789012.dkr.ecr.us-east-1.amazonaws.com/image:1"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a package in it, which is not on the import path."""
    package = tmp_path / "my_project"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "training.py").write_text("def train(*, manager, rank, world_size): ...\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _preview(
    backend: str, settings: dict[str, Any], *imports: str, gpu: str | None = None
) -> list[dict[str, Any]]:
    executor = get_executor(backend, **settings)
    assert isinstance(executor, PreviewsLaunch)
    arguments = {"rendezvous_uri": "s3://bucket/runs/run-1", "spec_hash": "0"}
    options = LaunchOptions(name="run-1", imports=imports)
    return executor.preview_launch(
        1, "diloco_cloud.replica_entrypoint", arguments, gpu=gpu, options=options
    )


def _mounted(settings: dict[str, Any], *imports: str) -> list[str]:
    modules: list[str] = _preview("modal", settings, *imports)[0]["image"].get("modules", [])
    return [name for name in modules if not name.startswith("diloco_cloud")]


def test_run_asks_for_its_trainer_where_that_is_not_the_packages_own() -> None:
    own = RunSpec(run_id="run-1", trainer="my_project.training:train")
    ours = RunSpec(run_id="run-1")
    assert build_request(own, "s3://b/run-1").options.imports == ("my_project.training",)
    assert build_request(ours, "s3://b/run-1").options.imports == ()


def test_modal_mounts_the_trainers_package_from_the_working_directory(project: Path) -> None:
    assert _mounted({}, "my_project.training") == ["my_project"]
    assert _mounted({"modules": ["my_project"]}, "my_project.training") == ["my_project"]
    assert _mounted({"image": "me/image"}, "my_project.training") == ["my_project"]


def test_modal_leaves_alone_what_a_given_image_may_have_for_itself(project: Path) -> None:
    assert _mounted({}, "click") == ["click"]
    assert _mounted({"image": "me/image"}, "click") == []
    assert _mounted({"image": "me/image"}, "only_in_the_image") == []


def test_modal_refuses_a_trainer_that_nothing_brings() -> None:
    with pytest.raises(ConfigError, match=r"'nowhere\.training' is not on this machine"):
        _preview("modal", {}, "nowhere.training")


def test_modal_is_launched_with_nothing_said_of_modules(project: Path) -> None:
    words = "launch --backend modal --store s3://bucket/runs --dry-run"
    result = CliRunner().invoke(cli, [*words.split(), "--trainer", "my_project.training:train"])
    assert result.exit_code == 0, result.output
    deployment = json.loads(result.stdout)["provider_requests"][0]
    assert "my_project" in deployment["image"]["modules"]


@pytest.mark.parametrize("settings", [{"image": "me/image"}, {"install": "my-project"}])
def test_hf_jobs_trusts_an_image_or_an_installation_of_the_users(settings: dict[str, Any]) -> None:
    assert _preview("hf-jobs", settings, "my_project.training")


def test_hf_jobs_refuses_a_trainer_that_its_own_image_lacks() -> None:
    assert _preview("hf-jobs", {})
    with pytest.raises(ConfigError, match=r"'my_project.training' would not be in python:"):
        _preview("hf-jobs", {}, "my_project.training")


@pytest.mark.parametrize("more", [{"image": ECR}, {"image": ECR, "source_dir": "."}])
def test_sagemaker_trusts_an_image_of_the_users(more: dict[str, Any], project: Path) -> None:
    assert _preview("sagemaker", {**SAGEMAKER, **more}, "my_project.training", gpu="A10G")


def test_sagemaker_refuses_a_trainer_that_awss_container_lacks() -> None:
    with pytest.raises(ConfigError, match="would not be in AWS's container") as caught:
        _preview("sagemaker", SAGEMAKER, "my_project.training", gpu="A10G")
    assert "source_dir=." in str(caught.value.fix)


@pytest.mark.parametrize(
    ("backend", "settings"), [("slurm", {}), ("ray", {"address": "http://127.0.0.1:8265"})]
)
def test_clusters_are_taken_to_have_what_their_users_put_there(
    backend: str, settings: dict[str, Any]
) -> None:
    assert _preview(backend, settings, "my_project.training")
