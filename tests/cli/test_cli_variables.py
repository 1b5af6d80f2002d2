"""Variables that nobody reads, and that look as if somebody should."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

import diloco_cloud
from diloco_cloud.run.config import known_variables

Call = Callable[..., Result]

PACKAGE = Path(diloco_cloud.__file__).parent


def test_misspelt_variable_is_told_once_by_every_command(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_STOER", "s3://bucket/runs")
    warning = "Warning: nobody reads DILOCO_STOER; did you mean DILOCO_STORE?\n"
    result = call("ls", "--store", str(tmp_path))
    assert (result.exit_code, result.stderr) == (0, f"{warning}No runs here.\n")
    planned = call("launch", "--dry-run")
    assert (planned.exit_code, planned.stderr.count("DILOCO_STOER")) == (0, 1)


@pytest.mark.parametrize(
    "name",
    ["DILOCO_STORE", "DILOCO_HOME", "DILOCO_RUN_KEY", "DILOCO_ENV", "DILOCO_FLAVOUR", "OTHER"],
)
def test_variable_that_somebody_may_read_is_not_told_of(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, str(tmp_path))
    assert "nobody reads" not in call("ls", "--store", str(tmp_path)).stderr


def test_every_variable_that_the_package_reads_is_known() -> None:
    files = [*PACKAGE.rglob("*.py"), *(PACKAGE / "executors").resolve().rglob("*.py")]
    named = {
        name for file in files for name in re.findall(r'"(DILOCO_[A-Z_]*[A-Z])"', file.read_text())
    }
    assert "DILOCO_ATTEMPT" in named
    assert named <= {*known_variables()}
