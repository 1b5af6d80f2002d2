"""Fixtures: a store, a scripted backend, and a clock that only sleep moves."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import scripted_executor
from clocked_store import ClockedStore
from manual_clock import Clock
from scripted_executor import ScriptedExecutor

from diloco_cloud.run import Run, RunSpec, launch
from diloco_cloud.run.record import read_run
from diloco_cloud.store.base import ObjectStore


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedExecutor:
    """The scripted backend, installed as a plug-in."""
    site = tmp_path / "site"
    scripted_executor.install(site)
    (tmp_path / "scripted").mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv(scripted_executor.DIRECTORY_ENV, str(tmp_path / "scripted"))
    return ScriptedExecutor()


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A trainer in the working directory, which is a fresh one."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "toy_trainer.py").write_text(
        "import a_heavy_package_that_is_not_there\n"
        "def train(*, manager, rank, world_size, steps=1, lr=0.1, rounds=1): ...\n"
        "async def needy(*, manager, rank, world_size, data): ...\n"
        "def wrong(model): ...\n"
    )
    monkeypatch.chdir(work)
    assert "toy_trainer" not in sys.modules
    return "toy_trainer:train"


@pytest.fixture
def store_uri(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def clock() -> Clock:
    return Clock(time.time())


@pytest.fixture
def make_run(
    scripted: ScriptedExecutor, trainer: str, store_uri: str, clock: Clock
) -> Callable[..., Run]:
    """Launches a run on the scripted backend and opens it with the test's clock."""

    def make(run_id: str = "run-1", replicas: int = 2, **settings: object) -> Run:
        spec = RunSpec(
            run_id=run_id, backend="scripted", replicas=replicas, trainer=trainer, **settings
        )
        launch(spec, store_uri, clock=clock.time)
        return Run.open(store_uri, run_id, clock=clock.time, sleep=clock.sleep)

    return make


@pytest.fixture
def make_clocked(make_run: Callable[..., Run], clock: Clock) -> Callable[..., Run]:
    """As ``make_run``; the run's store too tells time by the test's clock."""

    def make(*arguments: str, **settings: object) -> Run:
        store = ClockedStore(make_run(*arguments, **settings).store, clock)
        return reopen(store, clock)

    return make


def reopen(store: ObjectStore, clock: Clock) -> Run:
    """The run whose prefix is ``store``, as another process would see it."""
    record = read_run(store)
    assert record is not None
    return Run(store, record, clock=clock.time, sleep=clock.sleep)
