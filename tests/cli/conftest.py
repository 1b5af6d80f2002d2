"""Fixtures of the command-line tests: those of the run tests, and a way to call the command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))

from run_fixtures import clock, make_run, scripted, store_uri, trainer

from diloco_cloud.cli.main import cli

__all__ = ["clock", "make_run", "scripted", "store_uri", "trainer"]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """``call("ls", "--json")`` runs the command in this process."""
    monkeypatch.delenv("DILOCO_STORE", raising=False)
    monkeypatch.delenv("DILOCO_DEBUG", raising=False)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(cli, arguments)

    return run
