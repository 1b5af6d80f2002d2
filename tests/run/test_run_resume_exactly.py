"""Every process of a run killed at once, at any moment: it ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_cloud import keys
from diloco_cloud.run import Run, RunSpec, launch

#: AdamW, dropout and noise from the global generators; slow enough to be killed on the way.
TRAINER = """\
import random, time
import torch
from diloco_cloud.outer import make_diloco_outer_loop

def train(*, manager, rank, world_size, sync_every, rounds):
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    random.seed(rank)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 8)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = make_diloco_outer_loop(manager, [model], optimizer, sync_every=sync_every, model=model)
    with outer:
        while outer.schedule_step < rounds * sync_every:
            time.sleep(0.02)
            x = torch.randn(4, 8) * (1 + random.random())
            loss = (model(x) - x.sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            manager.report(tokens=4)
            optimizer.step()
"""
KILLS = 2
DEADLINE_S = 150.0


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def _beats(run: Run) -> list[dict[str, Any]]:
    listed = [info.key for info in run.store.list(keys.ALIVE)]
    return [json.loads(run.store.get(key)) for key in listed]


def _decided(run: Run) -> int:
    """Rounds that have been decided since the oldest kept one."""
    return max((int(name[:8]) for name in run.store.list_dirs(keys.ROUNDS)), default=-1)


def _digest(run: Run) -> str:
    status = run.wait(timeout=DEADLINE_S)
    assert status.state == "succeeded", status
    digest = run.results().digest
    assert digest is not None
    return digest


@pytest.mark.timeout(400)
def test_a_run_killed_as_a_whole_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DILOCO_RUN_KEY", "k" * 32)
    project = tmp_path / "project"
    project.mkdir()
    (project / "noisy_diloco.py").write_text(TRAINER)
    monkeypatch.chdir(project)

    def start(run_id: str) -> Run:
        spec = RunSpec(
            run_id=run_id,
            replicas=2,
            quorum=2,
            trainer="noisy_diloco:train",
            sync_every=5,
            rounds=16,
            heartbeat=0.5,
            checkpoint_inner=True,
            signed=True,
        )
        return launch(spec, tmp_path / "runs")

    rng = random.Random(0)
    killed = start("killed")
    for attempt in range(KILLS):
        at = _decided(killed) + rng.randint(3, 5)
        _until(lambda at=at: _decided(killed) >= at)  # type: ignore[misc]
        time.sleep(rng.uniform(0.0, 0.15))
        for beat in _beats(killed):
            assert beat["attempt"] == attempt
            os.kill(beat["pid"], signal.SIGKILL)
        _until(lambda: killed.status().is_terminal)
        assert Run.open(tmp_path / "runs", "killed").resume() == [0, 1]
    assert _digest(killed) == _digest(start("undisturbed"))
    assert killed.store.list(keys.INNER) == []
