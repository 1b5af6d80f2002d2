"""Ray's states and error types as statuses, and the runner that stands by a replica."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from diloco_cloud.executor import Reason, State
from diloco_cloud.executors.ray.states import (
    REASONS,
    STATES,
    TIMED_OUT,
    TIMED_OUT_LINE,
    status_of,
)

#: Of ray 2.60, ``ray/dashboard/modules/job/common.py``.
JOB_STATES = ["PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]
ERROR_TYPES = [
    "RUNTIME_ENV_SETUP_FAILURE",
    "JOB_SUPERVISOR_ACTOR_START_TIMEOUT",
    "JOB_SUPERVISOR_ACTOR_START_FAILURE",
    "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE",
    "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE",
    "JOB_SUPERVISOR_ACTOR_DIED",
    "JOB_ENTRYPOINT_COMMAND_START_ERROR",
    "JOB_ENTRYPOINT_COMMAND_ERROR",
]
#: As a real head said it.
FAILED = (
    "Job entrypoint command failed with exit code {code}, last available logs (truncated to "
    "20,000 chars):\n{tail}"
)


def _failed(code: int | None, tail: str, **values: Any) -> dict[str, Any]:
    message = FAILED.format(code=code, tail=tail)
    return {"status": "FAILED", "driver_exit_code": code, "message": message, **values}


@pytest.mark.parametrize("name", JOB_STATES)
def test_state_every_state_of_ray_is_known(name: str) -> None:
    assert STATES[name] in get_args(State)
    assert status_of({"status": name, "message": ""}) == STATES[name]


@pytest.mark.parametrize("name", ERROR_TYPES)
def test_error_every_error_type_of_ray_is_known(name: str) -> None:
    assert REASONS[name] in get_args(Reason)
    status = status_of({"status": "FAILED", "message": "", "error_type": name})
    assert (status, status.reason) == ("failed", REASONS[name])


def test_state_of_a_later_ray_is_unknown_not_failed() -> None:
    assert status_of({"status": "HIBERNATING"}) == "unknown"
    assert status_of({}) == "unknown"
    assert status_of({"status": "FAILED", "error_type": "NEW"}).reason == "lost"


def test_waiting_job_says_what_it_waits_for() -> None:
    message = "Job has not started yet. It may be waiting for resources (CPUs, GPUs, memory)."
    assert status_of({"status": "PENDING", "message": message}).message == message
    assert status_of({"status": "RUNNING", "message": "Job is currently running."}).message == ""


@pytest.mark.parametrize(
    ("code", "tail", "reason", "exit_code", "message"),
    [
        (3, "a\nValueError: boom\n", "exit_code", 3, "ValueError: boom"),
        (139, "Fatal Python error\n", "exit_code", -11, "killed by SIGSEGV"),
        (1, "x\nMemoryError\n", "out_of_memory", 1, "MemoryError"),
        (124, f"x\n{TIMED_OUT_LINE}\n", "timeout", 124, "ran past its timeout and was stopped"),
        (124, "by itself\n", "exit_code", 124, "by itself"),
    ],
)
def test_failure_is_read_from_the_end_of_the_log(
    code: int, tail: str, reason: str, exit_code: int, message: str
) -> None:
    status = status_of(_failed(code, tail))
    assert (status.reason, status.exit_code, status.message) == (reason, exit_code, message)


# -- the runner ------------------------------------------------------------------------------------


def _run(*options: str, code: str, timeout: float = 60) -> subprocess.Popen[str]:
    words = ["-m", "diloco_cloud.executors.ray.runner", f"--timeout={timeout}", *options, "--"]
    return subprocess.Popen(
        [sys.executable, *words, sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("pass", 0),
        ("import sys; sys.exit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 137),
    ],
)
def test_runner_ends_as_the_replica_did(code: str, exit_code: int) -> None:
    process = _run("--grace=1", code=code)
    process.communicate(timeout=60)
    assert process.returncode == exit_code


@pytest.mark.parametrize("handler", ["lambda *_: sys.exit(0)", "signal.SIG_IGN"])
def test_runner_stops_a_replica_at_its_timeout(handler: str) -> None:
    code = (
        f"import signal, sys, time\nsignal.signal(signal.SIGTERM, {handler})\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    process = _run("--grace=0.5", code=code, timeout=3)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == TIMED_OUT
    assert out.endswith(f"{TIMED_OUT_LINE}\n")


def test_runner_leaves_sigterm_to_the_replica() -> None:
    """Ray signals each process of a job; a second signal would cut the replica's time short."""
    code = (
        "import signal, time\nheard = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: heard.append(1))\n"
        "print('up', flush=True)\ntime.sleep(3)\nprint('heard', len(heard), flush=True)"
    )
    process = _run("--grace=1", code=code)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "heard 0\n")


def test_runner_without_its_secrets_does_not_start_the_replica(tmp_path: Path) -> None:
    for option in (f"--secrets={tmp_path}/none", "--expect=CONTRACT_SUITE_ABSENT"):
        process = _run("--grace=1", option, code="print('started')")
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 78
        assert "started" not in out
        assert out.startswith("diloco-cloud: ")


def test_runner_adds_little_to_a_start() -> None:
    """It is imported on every node before the replica: it must load neither torch nor numpy."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "diloco_cloud.executors.ray.runner", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert loaded.isdisjoint({"torch", "numpy", "requests", "ray"})
