"""The worked example of docs/executors.md is installed, found, and keeps the contract."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_cloud.executor_registry import get_executor
from diloco_cloud.run.config import resolve

PAGE = Path(__file__).parents[2] / "docs" / "executors.md"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The example, as a package that is installed in a directory."""
    program, suite = _blocks("python")
    site = tmp_path / "site"
    info = site / "ssh_executor-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "ssh_executor.py").write_text(program)
    (site / "test_ssh.py").write_text(suite)
    declared = next(text for text in _blocks("ini") if "entry-points" in text)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ssh-executor\nVersion: 1.0\n")
    line = declared.splitlines()[1]
    (info / "entry_points.txt").write_text(
        f"[diloco_cloud.executors]\n{line.replace(chr(34), '')}\n"
    )
    return site


def test_example_is_found_and_configured(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(package)
    monkeypatch.delitem(sys.modules, "ssh_executor", raising=False)
    file = tmp_path / "run.toml"
    file.write_text(next(text for text in _blocks("ini") if "[backend.ssh]" in text))
    spec = resolve({}, environ={}, file=file).spec
    assert spec.backend == "ssh"
    executor = get_executor(spec.backend, **spec.backend_args["ssh"])
    assert executor.backend_name == "ssh"


def test_example_keeps_the_contract(package: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, "--basetemp", str(tmp_path / "base"), "test_ssh.py"],
        cwd=package,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert re.search(r"\d{2} passed", ended.stdout), ended.stdout[-2000:]
