"""What runs in a container, without a Modal: a replica in a child process, and its ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from diloco_cloud.executors.modal.container import TimeSliceOver, run_replica

PROGRAMS = "diloco_cloud.testing.programs"
TESTS = str(Path(__file__).parent)


def _job(function: str = f"{PROGRAMS}:tell", **given: Any) -> dict[str, Any]:
    module, _, name = function.partition(":")
    job = {
        "module": module,
        "function": name,
        "arguments": {},
        "environment": {"REPLICA_RANK": "1"},
        "limit_s": 60,
        "resumes": False,
    }
    return job | given


def _replica(function: str, **arguments: Any) -> dict[str, Any]:
    return _job(f"replica_programs:{function}", arguments=arguments)


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TESTS)


def test_result_and_exit_code_are_returned(capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run_replica(1, _replica("echo", a=[1, None]))
    assert outcome == {
        "diloco_replica": 1,
        "exit_code": 0,
        "reason": None,
        "error": None,
        "result": {"a": [1, None]},
    }
    out = capfd.readouterr().out
    assert out.splitlines() == ["diloco-replica rank=1 attempt=0", "replica 1 speaks"]


@pytest.mark.parametrize(
    ("function", "arguments", "code", "reason", "error"),
    [
        ("fail", {"message": "boom\nmore"}, 1, None, "ValueError: boom"),
        ("run_out_of_memory", {}, 1, "out_of_memory", "MemoryError"),
        ("leave", {"code": 7}, 7, None, None),
        ("leave_at_once", {"code": 8}, 8, None, None),
        ("kill_self", {"signum": 9}, -9, None, None),
    ],
)
def test_crash_is_a_result_and_not_the_end_of_the_container(
    function: str, arguments: dict[str, Any], code: int, reason: str | None, error: str | None
) -> None:
    outcome = run_replica(0, _replica(function, **arguments))
    assert [outcome[key] for key in ("exit_code", "reason", "error")] == [code, reason, error]
    assert outcome["result"] is None


def test_result_that_is_not_json_is_dropped() -> None:
    outcome = run_replica(0, _replica("not_json"))
    assert (outcome["exit_code"], outcome["result"]) == (0, None)


def test_timeout_is_told() -> None:
    outcome = run_replica(0, _replica("sleep") | {"limit_s": 0.5})
    assert (outcome["exit_code"], outcome["reason"]) == (-signal.SIGTERM, "timeout")


def test_end_of_a_time_slice_is_an_exception_that_modal_answers_with_a_retry() -> None:
    with pytest.raises(TimeSliceOver):
        run_replica(0, _replica("sleep") | {"limit_s": 0.5, "resumes": True})


def test_replica_that_was_quicker_than_its_last_slice_has_succeeded(tmp_path: Path) -> None:
    ready = str(tmp_path / "ready")
    outcome = run_replica(0, _replica("finish_on_sigterm", ready=ready) | {"limit_s": 1.5})
    assert [outcome[key] for key in ("exit_code", "reason", "error")] == [0, None, None]


def test_script_is_found_beside_the_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("import sys; print('args', sys.argv[1:])")
    monkeypatch.syspath_prepend(str(tmp_path))
    job = _job() | {"script": "train.py", "args": ["+a=1", "b c"]}
    assert run_replica(0, job)["exit_code"] == 0
    assert "args ['+a=1', 'b c']" in capfd.readouterr().out


def test_what_a_replica_leaves_behind_is_ended(tmp_path: Path) -> None:
    ready = tmp_path / "pid"
    run_replica(0, _replica("leave_child_behind", ready=str(ready)))
    _await_end(int(ready.read_text()))


PROGRAM = """\
import json, sys
from diloco_cloud.executors.modal.container import run_replica
try:
    run_replica(0, json.loads(sys.argv[1]))
except KeyboardInterrupt:
    sys.exit(42)
"""


def test_interrupt_reaches_the_replica_as_sigterm_and_goes_on(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    job = json.dumps(_replica("ask_child_on_sigterm", ready=str(ready)))
    environment = {**os.environ, "PYTHONPATH": TESTS}
    container = subprocess.Popen([sys.executable, "-c", PROGRAM, job], env=environment)
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        container.send_signal(signal.SIGINT)
        assert container.wait(60) == 42
    finally:
        container.kill()
        container.wait()
    # Its helpers could finish first: the signal went to the replica alone.
    assert Path(f"{ready}.answer").read_text() == "finished"


def _await_end(pid: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == b"Z":
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} is still there")
