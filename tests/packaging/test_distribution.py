"""What pip gets: wheel, source distribution, extras and pins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import diloco_cloud

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def _package_files() -> set[str]:
    return {
        Path(folder, name).relative_to(ROOT).as_posix()
        for folder, _, names in os.walk(ROOT / "diloco_cloud", followlinks=True)
        for name in names
        if "__pycache__" not in folder
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert files == _package_files()
    assert {"diloco_cloud/py.typed", "diloco_cloud/executors/__init__.py"} <= files


def test_wheel_carries_the_licence(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (licence,) = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    text = archive.read(licence).decode()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    assert "License-Expression: Apache-2.0" in archive.read(metadata).decode()


def test_source_distribution_builds_the_same_wheel(built: Path) -> None:
    """The symlink is resolved in it, so that it unpacks where there are none."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {member.name.split("/", 1)[-1] for member in archive.getmembers()}
    assert {"pyproject.toml", "README.md", "LICENSE"} <= members
    assert {name for name in members if name.startswith("diloco_cloud/")} == _package_files()


def test_executors_are_one_copy_with_two_paths() -> None:
    link = ROOT / "diloco_cloud" / "executors"
    assert link.is_symlink()
    assert os.readlink(link) == "../executors"


def test_versions_agree() -> None:
    assert PROJECT["version"] == diloco_cloud.__version__


def test_entry_points_resolve() -> None:
    for group in [PROJECT["scripts"], *PROJECT["entry-points"].values()]:
        for target in group.values():
            module, _, name = target.partition(":")
            path = ROOT / Path(*module.split("."))
            source = path.with_suffix(".py") if not path.is_dir() else path / "__init__.py"
            assert re.search(rf"\b{name}\b", source.read_text()), target


def _expand(extra: str) -> set[str]:
    """Names of the distributions an extra brings, references to other extras followed."""
    names: set[str] = set()
    for text in EXTRAS[extra]:
        requirement = Requirement(text)
        if requirement.name == "diloco-cloud":
            names |= set().union(*(_expand(other) for other in requirement.extras))
        else:
            names.add(canonicalize_name(requirement.name))
    return names


def test_all_is_every_extra_that_shares_an_environment() -> None:
    apart = {"monarch", "replaysim", "rewards", "sagemaker-sdk", "teachers"}
    together = set().union(*(_expand(extra) for extra in EXTRAS if extra not in apart | {"all"}))
    assert _expand("all") == together


def test_extras_bound_what_shares_botocore() -> None:
    """Without a floor on each, pip walks back to an s3fs of 2020 to satisfy boto3."""
    for extra, name in [("fsspec", "s3fs"), ("sagemaker", "boto3")]:
        (requirement,) = [r for r in map(Requirement, EXTRAS[extra]) if r.name == name]
        assert any(clause.operator == ">=" for clause in requirement.specifier)


def test_no_core_dependency_is_a_cloud_sdk() -> None:
    core = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    assert core == {"blake3", "click", "numpy", "rich", "torch", "transformers", "xxhash"}


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def test_constraints_pin_every_requirement_within_its_bounds() -> None:
    pins = _pins()
    texts = [*PROJECT["dependencies"], *PYPROJECT["dependency-groups"]["dev"]]
    reached = re.findall(r"[\w-]+", " ".join(EXTRAS["all"] + EXTRAS["serverless"]))
    for extra in set(reached) & set(EXTRAS):
        texts += EXTRAS[extra]
    for requirement in map(Requirement, texts):
        if requirement.name != "diloco-cloud":
            version = pins.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement.name} is not in constraints.txt"
            assert requirement.specifier.contains(version), f"{requirement} against {version}"


def test_constraints_are_the_same_on_every_machine() -> None:
    text = (ROOT / "constraints.txt").read_text()
    assert re.search(r"^torch==[\d.]+$", text, re.M), "torch without a local version suffix"
    assert not re.search(r"^(nvidia|cuda|triton)", text, re.M)


def test_makefile_installs_the_torch_of_the_constraints() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (version,) = re.findall(r"^TORCH_VERSION := (\S+)$", makefile, re.M)
    assert _pins()["torch"] == version


def test_extras_table_of_the_docs_is_the_one_of_pyproject() -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \|", text, re.M)
    documented = {extra: set(re.findall(r"`(\S+)`", packages)) for extra, packages in rows}
    declared = {
        extra: {re.split(r"[<>=; ]", text)[0] for text in texts} for extra, texts in EXTRAS.items()
    }
    assert documented == declared
