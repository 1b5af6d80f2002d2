"""Volunteer reducers in real runs: real processes, launched and stopped by the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from diloco_cloud.executors.local.runner import is_alive, start_token
from diloco_cloud.run import Run, list_runs

#: 3 MB, which is three chunks. Each round waits for the test's word.
TRAINER = """\
import pathlib, time
import torch
from diloco_cloud.outer import make_diloco_outer_loop

def train(*, manager, rank, world_size, sync_every, rounds, gates):
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 768)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_diloco_outer_loop(manager, [model], optimizer, sync_every=sync_every, model=model):
        for step in range(rounds * sync_every):
            while not pathlib.Path(gates, str(step // sync_every)).exists():
                time.sleep(0.02)
            generator = torch.Generator().manual_seed(1000 * rank + step)
            optimizer.zero_grad()
            model(torch.randn(4, 1024, generator=generator)).square().mean().backward()
            manager.report(tokens=4)
            optimizer.step()
"""
ROUNDS = 8
DEADLINE_S = 240.0


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    directory = tmp_path / "project"
    (directory / "gates").mkdir(parents=True)
    (directory / "sized.py").write_text(TRAINER)
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(directory)
    yield directory
    for run in list_runs(directory / "runs") if (directory / "runs").is_dir() else ():
        run.cancel()
        run._reducers.stop(60.0, time.sleep)
        assert run.wait(timeout=60).is_terminal


def _launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = (
        *("launch", "--replicas", "3", "--reducers", "1", "--reduction", "sharded"),
        *("--trainer", "sized:train", "--set", f"gates={Path('gates').absolute()}"),
        *("--run-id", "run-1", "--rounds", str(ROUNDS), "--sync-every", "2"),
        # All three in every round: on a busy machine one may else be late for the last.
        *("--quorum", "3", "--heartbeat", "1s", "--snapshot-every", "100", "-d", *arguments),
    )
    return subprocess.run(
        [sys.executable, "-m", "diloco_cloud.cli.main", *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )


def _until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} never came"
        time.sleep(0.1)
    return found


def _open_gates(project: Path, *rounds: int) -> None:
    for one in rounds:
        (project / "gates" / str(one)).touch()


def _commit(project: Path, round_: int) -> dict[str, Any]:
    path = project / "runs" / "run-1" / "rounds" / f"{round_:08d}.0" / "commit"
    _until(path.exists, f"round {round_}")
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def _reducer(project: Path) -> dict[str, Any]:
    """The reducer's sign of life, once it is up and the replicas' own have followed."""
    path = project / "runs" / "run-1" / "reducers" / "alive" / "0000.json"
    replicas = [project / "runs" / "run-1" / "alive" / f"{rank:04d}.json" for rank in range(3)]
    _until(lambda: all(map(Path.exists, [path, *replicas])), "a sign of life")
    _until(lambda: "reducing" in path.read_text(), "the reducer's work")
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


@pytest.mark.parametrize("signed", [False, True])
def test_killing_the_reducer_costs_time_and_not_the_round(
    project: Path, call: Callable[..., Result], signed: bool
) -> None:
    key = {"DILOCO_RUN_KEY": "an example's key, 16+"} if signed else {}
    launched = _launch(*(["--signed"] if signed else []), **key)
    assert "3 replicas and 1 reducer are launched on local." in launched.stderr
    pid = _reducer(project)["pid"]
    shown = call("status", "run-1").stdout
    assert "1 of 1 reducers are alive." in shown

    _open_gates(project, 0, 1, 2)
    commits = [_commit(project, one) for one in range(3)]
    assert [(one["plan"], one.get("reducers", 0)) for one in commits] == [("sharded", 1)] * 3
    _until(lambda: _reducer(project)["round"] >= 3, "a served round")
    os.kill(pid, signal.SIGKILL)
    _open_gates(project, *range(3, ROUNDS))

    assert call("wait", "run-1").stdout == "SUCCEEDED\n"
    run = Run.open(project / "runs", "run-1")
    digests = run.results().digests
    assert len(digests) == 3
    assert len(set(digests)) == 1
    assert None not in digests
    assert run.spec.reducers == 1
    assert call("down", "run-1", "--yes").exit_code == 0
    assert not (project / "runs" / "run-1").exists()


def test_a_reducer_ends_with_its_run(project: Path, call: Callable[..., Result]) -> None:
    _launch()
    sign = _reducer(project)
    token = start_token(sign["pid"])
    _open_gates(project, *range(ROUNDS))
    assert call("wait", "run-1").stdout == "SUCCEEDED\n"
    _until(lambda: not is_alive(sign["pid"], token), "the reducer's end")
    outcomes = project / "runs" / "run-1" / "reducers" / "replicas" / "0000"
    outcome = json.loads((outcomes / "0000.outcome.json").read_bytes())
    assert (outcome["state"], outcome["result"] >= 1) == ("succeeded", True)


def test_cancel_stops_the_reducer(project: Path, call: Callable[..., Result]) -> None:
    _launch()
    sign = _reducer(project)
    token = start_token(sign["pid"])
    assert call("cancel", "run-1").exit_code == 0
    assert call("wait", "run-1").stdout == "CANCELLED\n"
    _until(lambda: not is_alive(sign["pid"], token), "the reducer's end")
    outcomes = project / "runs" / "run-1" / "reducers" / "replicas" / "0000"
    outcome = json.loads((outcomes / "0000.outcome.json").read_bytes())
    assert (outcome["state"], outcome["exit_code"]) == ("cancelled", 143)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--reducers", "-1"), "reducers is -1"),
        (("--reducers", "65"), "It must be between 0 and 64."),
        (("--reducers", "1", "--reduction", "all-gather"), "reduction is all-gather"),
    ],
)
def test_reducers_that_cannot_be_are_one_clear_error(
    project: Path, call: Callable[..., Result], arguments: tuple[str, ...], message: str
) -> None:
    result = call("launch", "--trainer", "sized:train", *arguments)
    assert (result.exit_code, message in result.stderr) == (2, True)
    assert "Traceback" not in result.stderr
    assert not (project / "runs").exists()
