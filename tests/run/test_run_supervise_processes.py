"""Real replicas in real processes that really die, started again by the supervisor or by resume."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_cloud import keys
from diloco_cloud.run import Run, RunSpec, launch
from diloco_cloud.run import restart as rules
from diloco_cloud.run.restarter import Event

TRAINER = """\
import os, pathlib, signal, threading, time
import torch
from diloco_cloud.outer import make_diloco_outer_loop

def train(*, manager, rank, world_size, sync_every, rounds, gate, fate=None, opens=0, hangs_at=0):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    attempt = int(os.environ["DILOCO_ATTEMPT"])
    if fate and fate.get(str(rank)) == "raise":
        raise ValueError("boom on purpose")
    if fate and fate.get(str(rank)) == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = make_diloco_outer_loop(manager, [model], optimizer, sync_every=sync_every, model=model)
    gate = pathlib.Path(gate)
    optimizer.step()  # its first one takes imports along, which is no time of training
    with outer:
        if opens and attempt >= opens:  # it has joined
            gate.touch()
        while outer.schedule_step < rounds * sync_every:
            # Half of the run is left to those who join late.
            while outer.schedule_step >= rounds * sync_every // 2 and not gate.exists():
                time.sleep(0.02)
            if hangs_at and attempt == 0 and outer.schedule_step == hangs_at:
                threading.Event().wait()
            loss = model(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            manager.report(tokens=8, loss=float(loss.detach()))
            optimizer.step()
    return {"rank": rank, "world_size": world_size, "attempt": attempt}
"""
#: Generous: processes import torch on a machine that does other things too.
DEADLINE_S = 150.0

Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Launches a run of local processes, which ends with the test."""
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    project = tmp_path / "project"
    project.mkdir()
    (project / "tiny_diloco.py").write_text(TRAINER)
    monkeypatch.chdir(project)
    runs: list[Run] = []

    def launch_run(replicas: int, *, trainer_args: dict[str, Any], **settings: Any) -> Run:
        spec = RunSpec(
            run_id="run-1",
            replicas=replicas,
            trainer="tiny_diloco:train",
            trainer_args={"gate": str(tmp_path / "gate"), **trainer_args},
            sync_every=2,
            rounds=8,
            **{"heartbeat": 0.5, **settings},
        )
        runs.append(launch(spec, tmp_path / "runs"))
        return runs[0]

    yield launch_run
    for run in runs:
        run.cancel()
        assert run.wait(timeout=60).is_terminal


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def _beat(run: Run, rank: int) -> dict[str, Any]:
    found = [info for info in run.store.list(keys.ALIVE) if info.key == keys.alive(rank)]
    return json.loads(run.store.get(keys.alive(rank))) if found else {}


def _kill(run: Run, rank: int) -> None:
    """Kill a replica that has been in a round."""
    _until(lambda: (_beat(run, rank).get("round") or 0) >= 1)
    os.kill(_beat(run, rank)["pid"], signal.SIGKILL)


def test_a_killed_replica_comes_back_and_the_run_succeeds(start: Start) -> None:
    run = start(2, trainer_args={"opens": 1})
    events: list[Event] = []
    killer = threading.Thread(target=_kill, args=(run, 1))
    killer.start()
    status = run.supervise(on_event=events.append, interval=0.2)
    killer.join()
    assert status.state == "succeeded", status
    assert [(event.kind, event.rank, event.attempt) for event in events] == [
        ("died", 1, 0),
        ("restarted", 1, 1),
    ]
    assert "killed by SIGKILL" in events[0].text
    assert [view.restarts for view in status.replicas] == [0, 1]
    # Its second life was averaged, and not only there.
    newest = run.status().last_commit
    assert newest is not None
    assert newest["contributors"] == [0, 1]
    results = run.results()
    assert [returned["attempt"] for returned in results.returned] == [0, 1]
    assert results.digest is not None
    assert (results.manifest or {})["digest"] == results.digest


def test_a_hung_replica_is_ended_and_comes_back_where_it_was(start: Start, tmp_path: Path) -> None:
    (tmp_path / "gate").touch()
    run = start(
        1,
        trainer_args={"hangs_at": 5},
        heartbeat=0.1,
        hang_timeout=1.5,
        max_restarts=10,  # a step may take longer than that on a machine that is busy
        backend_args={"local": {"grace": 1}},
    )
    events: list[Event] = []
    status = run.supervise(on_event=events.append, interval=0.2)
    assert status.state == "succeeded", status
    assert [(event.kind, event.attempt) for event in events[:3]] == [
        ("hung", 0),
        ("died", 0),
        ("restarted", 1),
    ]
    assert events[0].text.startswith("replica 0 lives and has made no step for ")
    assert events[1].text.startswith("replica 0 ended: hung")
    results = run.results()
    assert (results.manifest or {})["step"] == 8
    assert (results.manifest or {})["digest"] == results.digest


def test_errors_and_crash_loops_end_with_their_reason_while_the_rest_finishes(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rules, "FIRST_DELAY_S", 0.1)
    (tmp_path / "gate").touch()
    fate = {"1": "raise", "2": "kill"}
    run = start(3, trainer_args={"fate": fate}, max_restarts=2, grace=0.5)
    events: list[Event] = []
    status = run.supervise(on_event=events.append, interval=0.2)
    survivor, wrong, crashing = status.replicas
    assert survivor.state == "succeeded"
    assert (wrong.state, wrong.attempt, wrong.error) == ("failed", 0, "ValueError: boom on purpose")
    assert (crashing.state, crashing.exit_code) == ("failed", -signal.SIGKILL)
    told = [(event.kind, event.attempt) for event in events if event.rank == 2]
    assert told[0] == ("died", 0)
    assert told[-1] == ("given_up", crashing.attempt)
    assert crashing.given_up == "2 restarts in a row, none of which got into a round"
    assert [(event.kind, event.attempt) for event in events if event.rank == 1] == [("given_up", 0)]
    assert status.state == "failed"  # for the error of its own, not for the crashes


def test_resume_of_a_run_of_which_nothing_is_left_with_more_replicas(
    start: Start, tmp_path: Path
) -> None:
    run = start(2, trainer_args={"opens": 1})
    for rank in range(2):
        _kill(run, rank)
    _until(lambda: run.status().is_terminal)
    before = run.status()
    assert before.state == "failed"
    assert before.last_commit is not None
    assert Run.open(tmp_path / "runs", "run-1").resume(replicas=3) == [0, 1, 2]
    status = run.wait(timeout=DEADLINE_S)
    assert (status.state, status.size) == ("succeeded", 3), status
    results = run.results()
    assert [returned["world_size"] for returned in results.returned] == [3, 3, 3]
    assert results.digest is not None
    after = run.status().last_commit
    assert after is not None
    assert after["round"] > before.last_commit["round"]
