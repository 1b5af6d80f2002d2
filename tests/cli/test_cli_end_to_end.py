"""Real runs: real processes through the real local backend, followed from other processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers import free_ports

from diloco_cloud.run import list_runs

TRAINER = """\
import os, pathlib, time

def train(*, manager, rank, world_size, gate=None, crash=False):
    print(f"hello from {rank} of {world_size}")
    if crash and rank == 0:
        raise ValueError("boom on purpose")
    if crash:
        print("about to die")
        time.sleep(3)  # the log is sent every two seconds
        os.kill(os.getpid(), 11)
    while gate is not None and not pathlib.Path(gate).exists():
        time.sleep(0.05)
    return {"rank": rank}
"""
#: Generous: two processes import torch on a machine that does other things too.
DEADLINE_S = 120.0


class Terminal:
    """Runs the command as a user would: as a process, in some directory."""

    def __init__(self, directory: Path, home: Path) -> None:
        self.directory = directory
        self.environment = {**os.environ, "DILOCO_HOME": str(home)}
        self.environment.pop("DILOCO_STORE", None)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "diloco_cloud.cli.main", *arguments],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
        return process.returncode, out, err


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A terminal in a directory that holds a trainer; runs in ./runs there end with the test."""
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "toy.py").write_text(TRAINER)
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    yield Terminal(directory, tmp_path / "home")
    for run in list_runs(directory / "runs"):
        run.cancel()
        assert run.wait(timeout=60).is_terminal


@pytest.fixture
def elsewhere(tmp_path: Path) -> Terminal:
    """Another terminal, in another directory."""
    directory = tmp_path / "elsewhere"
    directory.mkdir()
    return Terminal(directory, tmp_path / "home")


def _launch(*arguments: str) -> tuple[str, ...]:
    return ("launch", "--replicas", "2", "--trainer", "toy:train", "--run-id", "run-1", *arguments)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.1)


def test_run_outlives_a_killed_launcher(
    launcher: Terminal, elsewhere: Terminal, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    process = launcher.start(*_launch("--set", f"gate={gate}"))
    store = launcher.directory / "runs"
    handles = [store / "run-1" / "replicas" / f"{rank:04d}" / "0000.json" for rank in range(2)]
    _until(lambda: all(path.exists() for path in handles))
    process.kill()
    process.communicate()
    where = ("run-1", "--store", str(store))

    code, out, _ = elsewhere.call("status", *where, "--json")
    assert (code, json.loads(out)["state"]) == (0, "running")
    code, out, _ = elsewhere.call("wait", *where, "--timeout", "0")
    assert (code, out) == (101, "RUNNING\n")
    assert elsewhere.call("status", "run-2", "--store", str(store))[0] == 102

    follower = elsewhere.start("logs", "-f", *where)
    gate.touch()
    out, _ = follower.communicate(timeout=DEADLINE_S)
    assert follower.returncode == 0
    for rank in range(2):
        assert f"replica/{rank} hello from {rank} of 2" in out
        assert f"replica/{rank} finished" in out
    assert elsewhere.call("wait", *where)[:2] == (0, "SUCCEEDED\n")
    (run,) = list_runs(store)
    assert run.results().returned == [{"rank": 0}, {"rank": 1}]


def test_supervise_elsewhere_takes_over_from_a_killed_launcher(
    launcher: Terminal, elsewhere: Terminal, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    process = launcher.start(*_launch("--set", f"gate={gate}"))
    store = launcher.directory / "runs"
    beat = store / "run-1" / "alive" / "0001.json"
    _until(beat.exists)
    process.kill()
    process.communicate()
    os.kill(json.loads(beat.read_bytes())["pid"], signal.SIGKILL)
    where = ("run-1", "--store", str(store))

    first = elsewhere.start("supervise", *where, "--json")
    _until((store / "run-1" / "replicas" / "0001" / "0001.json").exists)
    first.kill()
    out, _ = first.communicate()
    assert [json.loads(line)["event"] for line in out.splitlines()][:1] == ["died"]

    second = elsewhere.start("supervise", *where)
    gate.touch()
    out, err = second.communicate(timeout=DEADLINE_S)
    assert (second.returncode, out) == (0, "SUCCEEDED\n"), err
    replica = json.loads(elsewhere.call("status", *where, "--json")[1])["replicas"][1]
    assert (replica["attempt"], replica["restarts"]) == (1, 1)
    assert replica["restarted_after"].startswith("exit code -9: killed by SIGKILL")


def test_crash_is_failed_with_exit_code_reason_and_log(
    launcher: Terminal, elsewhere: Terminal, tmp_path: Path
) -> None:
    code, out, err = launcher.call(*_launch("--set", "crash=true", "--max-restarts", "0"))
    assert (code, out) == (100, "run-1\n")
    assert "ValueError: boom on purpose" in err
    where = ("run-1", "--store", str(launcher.directory / "runs"))

    raised, killed = json.loads(elsewhere.call("status", *where, "--json")[1])["replicas"]
    assert (raised["state"], raised["exit_code"], raised["reason"]) == ("failed", 1, "exit_code")
    assert raised["error"] == "ValueError: boom on purpose"
    assert "ValueError: boom on purpose" in raised["log_tail"][-1]
    assert (killed["state"], killed["exit_code"]) == ("failed", -signal.SIGSEGV)
    assert "about to die" in killed["log_tail"]
    assert not any("diloco_cloud" in line for line in raised["log_tail"] if "File" in line)
    (log,) = (tmp_path / "home" / "local").glob("*/0.0/log.txt")
    assert log.read_text().count("Traceback") == 1

    _, out, _ = elsewhere.call("logs", *where)
    assert out.count("ValueError: boom on purpose") == 1
    assert elsewhere.call("wait", *where)[0] == 100


def test_warnings_of_a_store_that_is_retried_reach_the_terminal(elsewhere: Terminal) -> None:
    elsewhere.environment |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_ports(1)[0]}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    process = elsewhere.start("ls", "--store", "s3://bucket/runs")
    assert process.stderr is not None
    try:
        said = process.stderr.readline()
    finally:
        process.kill()
        process.communicate()
    assert re.match(r"Warning: s3://bucket/runs cannot be reached .*; retrying in \S+ s", said)


def test_ctrl_c_detaches_then_cancel_resume_and_down(
    launcher: Terminal, elsewhere: Terminal, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    process = launcher.start(*_launch("--set", f"gate={gate}"))
    assert process.stdout is not None
    assert process.stdout.readline() == "run-1\n"  # launched
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    store = launcher.directory / "runs"
    assert "Detached; run-1 goes on." in err
    assert f"diloco-cloud cancel run-1 --store {store}" in err
    where = ("run-1", "--store", str(store))

    assert elsewhere.call("resume", *where)[0] == 2  # it is running
    assert elsewhere.call("cancel", *where)[0] == 0
    assert elsewhere.call("wait", *where)[:2] == (103, "CANCELLED\n")
    gate.touch()
    # The trainer is found again, in the directory of the launch.
    assert elsewhere.call("resume", *where)[0] == 0
    assert elsewhere.call("wait", *where)[:2] == (0, "SUCCEEDED\n")
    code, _, err = elsewhere.call("resume", *where)
    assert code == 2
    assert "nothing to resume" in err
    assert elsewhere.call("down", *where, "--yes")[0] == 0
    assert elsewhere.call("status", *where)[0] == 102
    assert not (store / "run-1").exists()
    assert list((tmp_path / "home" / "local").iterdir()) == []
