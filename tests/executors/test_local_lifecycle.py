"""How a local replica is followed and ended, whoever has died in the meantime."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from local_processes import PATIENCE, wait_for_end, wait_for_pid, wait_until

from diloco_cloud.executor import LaunchOptions, ReplicaHandle
from diloco_cloud.executors.local import LocalProcessExecutor

HERE = Path(__file__).parent


def start(
    local: LocalProcessExecutor, function: str, timeout: float = 3600, **arguments: object
) -> ReplicaHandle:
    """Launch one replica of ``replica_programs``."""
    entrypoint = f"replica_programs:{function}"
    return local.launch_replicas(1, entrypoint, arguments, timeout=timeout)[0]


def kill_runner(handle: ReplicaHandle) -> None:
    os.kill(handle.metadata["runner_pid"], signal.SIGKILL)
    wait_for_end(handle.metadata["runner_pid"])


def kill_replica(handle: ReplicaHandle) -> None:
    os.kill(handle.metadata["pid"], signal.SIGKILL)
    wait_for_end(handle.metadata["pid"])


def with_metadata(handle: ReplicaHandle, **changes: object) -> ReplicaHandle:
    return replace(handle, metadata={**handle.metadata, **changes})


def test_handle_works_in_a_fresh_executor_after_json(
    local: LocalProcessExecutor, tmp_path: Path
) -> None:
    text = json.dumps(asdict(start(local, "wait_for_file", path=str(tmp_path / "go_on"))))
    other = LocalProcessExecutor(state_dir=tmp_path / "elsewhere")
    handle = ReplicaHandle(**json.loads(text))
    assert other.poll(handle) == "running"
    (tmp_path / "go_on").touch()
    assert other.collect([handle], timeout=PATIENCE)[0]["result"] == "found"


def test_replica_outlives_a_killed_launcher(local: LocalProcessExecutor, tmp_path: Path) -> None:
    record = tmp_path / "handles.json"
    script = f"""
import dataclasses, json, os, sys, time
sys.path.insert(0, {str(HERE)!r})
from diloco_cloud.executors.local import LocalProcessExecutor
from replica_programs import write_whole
handles = LocalProcessExecutor(state_dir={str(tmp_path / "state")!r}, grace=0.3).launch_replicas(
    2, "replica_programs:wait_for_file", {{"path": {str(tmp_path / "go_on")!r}}})
write_whole({str(record)!r}, json.dumps([dataclasses.asdict(handle) for handle in handles]))
time.sleep(120)
"""
    launcher = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    wait_until(record.exists)
    os.killpg(launcher.pid, signal.SIGKILL)
    assert launcher.wait() == -signal.SIGKILL
    handles = [ReplicaHandle(**values) for values in json.loads(record.read_text())]
    assert [local.poll(handle) for handle in handles] == ["running", "running"]
    (tmp_path / "go_on").touch()
    results = local.collect(handles, timeout=PATIENCE)
    assert [result["result"] for result in results] == ["found", "found"]


def test_recover_finds_what_a_dead_launcher_left(local: LocalProcessExecutor) -> None:
    first = local.launch_replicas(
        2, "replica_programs:sleep", {}, options=LaunchOptions(name="run-1")
    )
    local.launch_replicas(1, "replica_programs", {}, options=LaunchOptions(name="run-1-b"))
    again = local.launch_replicas(
        1, "replica_programs", {}, options=LaunchOptions(name="run-1", world_size=2, attempt=1)
    )
    assert local.recover("run-1") == first + again
    assert local.recover("run") == []


def test_launcher_that_dies_while_starting_leaves_no_replica(
    local: LocalProcessExecutor, tmp_path: Path
) -> None:
    """The runner finds nobody to report to, and ends the replica it has started."""
    local.collect([start(local, "main")], timeout=PATIENCE)
    (ended,) = tmp_path.glob("state/*/0.0")
    directory = tmp_path / "state" / "orphan-12345678" / "0.0"
    directory.mkdir(parents=True)
    spec = json.loads((ended / "spec.json").read_text())
    spec["argv"] = [sys.executable, "-S", "-c", "import time; time.sleep(120)"]
    (directory / "spec.json").write_text(json.dumps(spec))
    reader, writer = os.pipe()
    os.close(reader)
    runner = Path(sys.modules[type(local).__module__].__file__ or "").with_name("runner.py")
    subprocess.run(
        [sys.executable, "-I", "-S", str(runner), "run", str(directory)],
        stdout=writer,
        check=True,
        timeout=PATIENCE,
        start_new_session=True,
    )
    os.close(writer)
    wait_until((directory / "exit.json").exists)
    (handle,) = local.recover("orphan")
    assert local.poll(handle).exit_code == -signal.SIGTERM


def test_replica_whose_runner_was_killed_still_runs_and_succeeds(
    local: LocalProcessExecutor, tmp_path: Path
) -> None:
    handle = start(local, "wait_for_file", path=str(tmp_path / "go_on"))
    kill_runner(handle)
    status = local.poll(handle)
    assert (status, status.message) == ("running", "its runner is dead: no timeout is enforced")
    (tmp_path / "go_on").touch()
    (result,) = local.collect([handle], timeout=PATIENCE)
    assert (result["status"], result["exit_code"]) == ("succeeded", None)
    assert result["result"] == "found"


def test_failure_is_known_without_a_runner(local: LocalProcessExecutor, tmp_path: Path) -> None:
    go_on = str(tmp_path / "go_on")
    handle = start(local, "fail_on_file", path=go_on)
    kill_runner(handle)
    Path(go_on).touch()
    (result,) = local.collect([handle], timeout=PATIENCE)
    assert (result["status"], result["status"].reason) == ("failed", "exit_code")
    assert result["error"].startswith("RuntimeError: found")


def test_replica_that_vanished_is_lost(local: LocalProcessExecutor) -> None:
    handle = start(local, "sleep")
    kill_runner(handle)
    kill_replica(handle)
    status = local.poll(handle)
    assert (status, status.exit_code, status.reason) == ("failed", None, "lost")


def test_recycled_pids_are_not_mistaken_for_the_replica(local: LocalProcessExecutor) -> None:
    """The pids live, but belong to processes that started at another time."""
    handle = start(local, "sleep")
    old = with_metadata(handle, pid_start="0.1", runner_start="0.1", directory="/no/such/state")
    assert local.poll(old).reason == "lost"
    local.cancel(old)
    ended = with_metadata(old, directory=handle.metadata["directory"])
    local.cancel(ended)
    assert local.poll(handle) == "running"


def test_removed_state_does_not_hide_a_running_replica(local: LocalProcessExecutor) -> None:
    handle = start(local, "sleep")
    shutil.rmtree(handle.metadata["directory"])
    assert local.poll(handle) == "running"
    assert local.stream_logs(handle) == ""
    local.cancel(handle)
    wait_for_end(handle.metadata["pid"])
    wait_until(lambda: local.poll(handle) == "failed")
    assert local.poll(handle).reason == "lost"


def test_removed_state_and_runner_still_allow_cancel(local: LocalProcessExecutor) -> None:
    handle = start(local, "sleep")
    kill_runner(handle)
    shutil.rmtree(handle.metadata["directory"])
    local.cancel(handle)
    wait_for_end(handle.metadata["pid"])


def test_replica_of_another_machine_is_unknown(local: LocalProcessExecutor) -> None:
    handle = start(local, "sleep")
    elsewhere = with_metadata(handle, host="elsewhere")
    status = local.poll(elsewhere)
    assert (status, status.reason) == ("unknown", None)
    assert "runs on elsewhere" in status.message
    local.cancel(elsewhere)
    assert local.poll(handle) == "running"
    (result,) = local.collect([elsewhere])
    assert result["status"] == "unknown"
    assert "runs on elsewhere" in result["error"]


@pytest.mark.parametrize(
    "handle",
    [ReplicaHandle(0, "modal", {"call": "fc-1"}), ReplicaHandle(0, "local_process", {"pid": 1})],
)
def test_foreign_handle_is_lost(local: LocalProcessExecutor, handle: ReplicaHandle) -> None:
    assert local.poll(handle).reason == "lost"
    assert local.stream_logs(handle) == ""
    local.cancel(handle)
    assert local.collect([handle])[0]["status"] == "failed"


def test_cancel_is_idempotent_and_final(local: LocalProcessExecutor) -> None:
    handle = start(local, "sleep")
    local.cancel(handle)
    local.cancel(handle)
    (result,) = local.collect([handle], timeout=PATIENCE)
    assert (result["status"], result["status"].reason) == ("cancelled", "cancelled")
    assert result["exit_code"] == -signal.SIGTERM
    assert result["error"].startswith("cancelled")
    local.cancel(handle)
    assert local.poll(handle) == "cancelled"


def test_cancelled_replica_may_end_well(local: LocalProcessExecutor, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    handle = start(local, "finish_on_sigterm", ready=str(ready))
    wait_until(ready.exists)
    local.cancel(handle)
    (result,) = local.collect([handle], timeout=PATIENCE)
    assert (result["status"], result["exit_code"]) == ("cancelled", 0)


@pytest.mark.parametrize("with_runner", [True, False])
def test_cancel_leaves_a_replica_its_helpers_while_the_grace_lasts(
    local: LocalProcessExecutor, state_dir: Path, tmp_path: Path, with_runner: bool
) -> None:
    patient = LocalProcessExecutor(state_dir=state_dir, grace=PATIENCE)
    ready = tmp_path / "ready"
    handle = start(patient, "ask_child_on_sigterm", ready=str(ready))
    wait_until(ready.exists)
    if not with_runner:
        kill_runner(handle)
    patient.cancel(handle)
    patient.collect([handle], timeout=PATIENCE)
    assert (tmp_path / "ready.answer").read_text() == "finished"


def test_replica_is_told_its_grace(local: LocalProcessExecutor) -> None:
    handle = start(local, "environment", names=["DILOCO_TERM_GRACE_S"])
    (result,) = local.collect([handle], timeout=PATIENCE)
    assert result["result"] == {"DILOCO_TERM_GRACE_S": "0.3"}


def test_cancel_of_an_ended_replica_changes_nothing(local: LocalProcessExecutor) -> None:
    handle = start(local, "main")
    local.collect([handle], timeout=PATIENCE)
    local.cancel(handle)
    assert local.poll(handle) == "succeeded"


def test_cancel_kills_what_ignores_sigterm(local: LocalProcessExecutor, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    handle = start(local, "ignore_sigterm", ready=str(ready))
    grandchild = wait_for_pid(ready)
    local.cancel(handle)
    assert local.poll(handle) == "running"  # cancel does not wait
    (result,) = local.collect([handle], timeout=PATIENCE)
    assert (result["status"], result["exit_code"]) == ("cancelled", -signal.SIGKILL)
    wait_for_end(grandchild)


def test_cancel_escalates_without_a_runner(local: LocalProcessExecutor, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    handle = start(local, "ignore_sigterm", ready=str(ready))
    grandchild = wait_for_pid(ready)
    kill_runner(handle)
    local.cancel(handle)
    (result,) = local.collect([handle], timeout=PATIENCE)
    assert (result["status"], result["exit_code"]) == ("cancelled", None)
    wait_for_end(grandchild)


def test_end_of_the_replica_ends_its_children(local: LocalProcessExecutor, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    handle = start(local, "leave_child_behind", ready=str(ready))
    assert local.collect([handle], timeout=PATIENCE)[0]["status"] == "succeeded"
    wait_for_end(wait_for_pid(ready))


def test_timeout_is_enforced(local: LocalProcessExecutor) -> None:
    handle = start(local, "sleep", timeout=0.2)
    (result,) = local.collect([handle], timeout=PATIENCE)
    status = result["status"]
    assert (status, status.reason, status.exit_code) == ("failed", "timeout", -signal.SIGTERM)
    assert result["error"].startswith("ran past its timeout")


def test_sigterm_that_nobody_asked_for_is_a_preemption(local: LocalProcessExecutor) -> None:
    handle = start(local, "sleep")
    os.kill(handle.metadata["runner_pid"], signal.SIGTERM)
    status = local.collect([handle], timeout=PATIENCE)[0]["status"]
    assert (status, status.reason) == ("failed", "preempted")


def test_forget_removes_the_state_of_ended_replicas_only(local: LocalProcessExecutor) -> None:
    ended, running = local.launch_replicas(2, "replica_programs:sleep", {})
    local.cancel(ended)
    local.collect([ended], timeout=PATIENCE)
    local.forget(ended)
    local.forget(running)
    assert not Path(ended.metadata["directory"]).exists()
    assert local.poll(running) == "running"
    local.cancel(running)
    local.collect([running], timeout=PATIENCE)
    local.forget(running)
    assert not Path(running.metadata["directory"]).parent.exists()
