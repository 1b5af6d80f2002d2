"""One store with runs of several backends: `ls` shows them all, whatever is installed here."""

from __future__ import annotations

import importlib.util
import json
import time
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
from click.testing import CliRunner
from fakes.hf_hub import FakeHub
from fakes.ray_dashboard import FakeDashboard
from hf_jobs_fixtures import IMAGE, hub
from ray_fixtures import dashboard

from diloco_cloud.cli.main import cli
from diloco_cloud.run import RunSpec, launch
from diloco_cloud.run.intents import Start, announce
from diloco_cloud.run.record import create_run
from diloco_cloud.store import open_store

__all__ = ["dashboard", "hub"]


def _spec(backend: str, **settings: Any) -> RunSpec:
    args = {backend: settings}
    return RunSpec(run_id=f"on-{backend}", backend=backend, replicas=2, backend_args=args)


@pytest.fixture
def no_modal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Modal's SDK."""
    find_spec = importlib.util.find_spec

    def without_modal(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "modal" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_modal)


def test_ls_shows_the_runs_of_all_backends(
    hub: FakeHub, dashboard: FakeDashboard, no_modal: None, s3_uri: str
) -> None:
    hub.queue()
    dashboard.held.set()
    launch(_spec("hf-jobs", image=IMAGE), s3_uri)
    launch(_spec("ray", address=dashboard.address), s3_uri)
    from_elsewhere = _spec("modal")
    prefix = open_store(f"{s3_uri}/{from_elsewhere.run_id}")
    create_run(prefix, from_elsewhere, created_at=time.time())
    start = Start(ranks=[0, 1], attempt=0, backend="modal", world_size=2, by="launch")
    announce(prefix, start, at=time.time())

    shown = CliRunner().invoke(cli, ["ls", "--store", s3_uri, "--json"])
    assert shown.exit_code == 0, shown.output
    runs = {run["run_id"]: run for run in json.loads(shown.stdout)}
    assert {name: run["state"] for name, run in runs.items()} == {
        "on-hf-jobs": "pending",
        "on-ray": "pending",
        "on-modal": "pending",
    }
    assert len(hub.jobs) == len(dashboard.bodies()) == 2
    table = CliRunner().invoke(cli, ["ls", "--store", s3_uri])
    assert table.exit_code == 0, table.output
    assert all(name in table.stdout for name in runs)
