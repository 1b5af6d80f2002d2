"""Fixtures: a run with two replicas on each of two scripted backends, which share a store."""

from __future__ import annotations

from pathlib import Path

import pytest
from manual_clock import Clock
from scripted_executor import ElsewhereExecutor, ScriptedExecutor

from diloco_cloud.run import Run, RunSpec, Side
from diloco_cloud.run.executors import Given


@pytest.fixture
def store_uri(tmp_path: Path) -> str:
    """A directory that all backends mount, as its URI says."""
    return (tmp_path / "store").as_uri()


@pytest.fixture
def elsewhere(scripted: ScriptedExecutor) -> ElsewhereExecutor:
    """The other backend."""
    return ElsewhereExecutor()


@pytest.fixture
def spec(trainer: str, elsewhere: ElsewhereExecutor) -> RunSpec:
    fleet = (Side("scripted", 2), Side("elsewhere", 2))
    return RunSpec(run_id="run-1", trainer=trainer, fleet=fleet)


def open_run(store_uri: str, clock: Clock, executor: Given = None) -> Run:
    """The run, as another process would see it."""
    return Run.open(store_uri, "run-1", executor=executor, clock=clock.time, sleep=clock.sleep)
