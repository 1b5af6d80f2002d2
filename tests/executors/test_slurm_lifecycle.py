"""Replicas on Slurm that are preempted, lost or forgotten, and what is told of them then."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.slurm_cluster import Cluster, FakeCluster
from slurm_fixtures import fake_slurm, real_slurm, slurm

from diloco_cloud.executor import LaunchOptions, ReplicaHandle, ReplicaStatus, Script
from diloco_cloud.executors.slurm import SlurmExecutor

__all__ = ["fake_slurm", "real_slurm", "slurm"]

PROGRAMS = "diloco_cloud.testing.programs"
NAMED = LaunchOptions(name="run-1")
PATIENCE_S = 90.0
#: Tells each signal, and ends when it is told to.
LISTENER = """\
import os, signal, sys, time

def note(signum, frame):
    print("heard", signum, flush=True)

signal.signal(signal.SIGTERM, note)
life = os.environ.get("SLURM_RESTART_COUNT", "0")
print("life", life, os.environ.get("CONTRACT_SECRET"), flush=True)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    time.sleep(0.05)
"""


@pytest.fixture
def executor(tmp_path: Path) -> SlurmExecutor:
    return SlurmExecutor(directory=str(tmp_path / "shared"), refresh_s=0.1)


@pytest.fixture
def listener(tmp_path: Path) -> Callable[[float], Script]:
    path = tmp_path / "listener.py"
    path.write_text(LISTENER)
    return lambda seconds: Script(str(path), (str(seconds),))


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} never happened"
        time.sleep(0.1)


def _printed(executor: SlurmExecutor, handle: ReplicaHandle, line: str) -> None:
    _until(lambda: line in executor.stream_logs(handle).splitlines(), line)


def _told(status: ReplicaStatus) -> tuple[str, str | None, int | None]:
    return str(status), status.reason, status.exit_code


def test_requeued_replica_is_the_same_one_and_hears_one_signal(
    slurm: Cluster,
    executor: SlurmExecutor,
    listener: Callable[[float], Script],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CONTRACT_SECRET", "hush")
    options = LaunchOptions(name="run-1", secrets=["CONTRACT_SECRET"])
    (handle,) = executor.launch_replicas(1, listener(2.5), {}, options=options)
    _printed(executor, handle, "life 0 hush")
    slurm.preempt(f"{handle.metadata['job']}_0")
    _until(lambda: executor.poll(handle) == "pending", "a second wait in the queue")
    _printed(executor, handle, "life 1 hush")
    (result,) = executor.collect([handle], timeout=PATIENCE_S)
    assert result.status == "succeeded"
    lines = executor.stream_logs(handle).splitlines()
    assert lines.count("heard 15") == 1
    assert not Path(handle.metadata["directory"], "secrets").exists()


def _sleeping(seconds: int) -> list[str]:
    """Processes that are a ``sleep`` of so many seconds."""
    wanted = f"sleep\0{seconds}\0".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes() == wanted:
                found.append(path.parent.name)
    return found


def test_replica_that_has_ended_leaves_no_process_behind(
    slurm: Cluster, executor: SlurmExecutor
) -> None:
    (told,) = executor.launch_replicas(1, f"{PROGRAMS}:tell", {}, timeout=54_321)
    (slept,) = executor.launch_replicas(1, f"{PROGRAMS}:sleep", {}, timeout=54_322)
    _until(lambda: "asleep" in executor.stream_logs(slept), "its start")
    assert _sleeping(54_322)  # the script keeps the time
    executor.cancel(slept)
    results = executor.collect([told, slept], timeout=PATIENCE_S)
    assert [result.status for result in results] == ["succeeded", "cancelled"]
    _until(lambda: not _sleeping(54_321) and not _sleeping(54_322), "the end of all processes")


def test_replica_that_may_not_be_requeued_was_preempted(
    fake_slurm: FakeCluster, tmp_path: Path
) -> None:
    executor = SlurmExecutor(directory=str(tmp_path / "shared"), requeue=False)
    (handle,) = executor.launch_replicas(1, f"{PROGRAMS}:sleep", {}, options=NAMED)
    _until(lambda: "asleep" in executor.stream_logs(handle), "its start")
    fake_slurm.end(f"{handle.metadata['job']}_0", "PREEMPTED")
    (result,) = executor.collect([handle], timeout=PATIENCE_S)
    assert (result.status, result.status.reason) == ("failed", "preempted")


@pytest.mark.parametrize(
    ("state", "reason"),
    [("NODE_FAIL", "lost"), ("OUT_OF_MEMORY", "out_of_memory"), ("TIMEOUT", "timeout")],
)
def test_replica_that_slurm_has_ended_says_why(
    fake_slurm: FakeCluster, executor: SlurmExecutor, state: str, reason: str
) -> None:
    (handle,) = executor.launch_replicas(1, f"{PROGRAMS}:sleep", {}, options=NAMED)
    _until(lambda: "asleep" in executor.stream_logs(handle), "its start")
    fake_slurm.end(f"{handle.metadata['job']}_0", state)
    (result,) = executor.collect([handle], timeout=PATIENCE_S)
    assert (result.status, result.status.reason) == ("failed", reason)


def test_forgotten_replicas_tell_by_their_own_record(
    fake_slurm: FakeCluster, executor: SlurmExecutor
) -> None:
    launches = [("tell", {}), ("leave", {"code": 7}), ("sleep", {}), ("fail", {"message": "boom"})]
    handles = [
        executor.launch_replicas(1, f"{PROGRAMS}:{name}", arguments, options=NAMED)[0]
        for name, arguments in launches
    ]
    _until(lambda: "asleep" in executor.stream_logs(handles[2]), "its start")
    executor.cancel(handles[2])
    before = [_told(r.status) for r in executor.collect(handles, timeout=PATIENCE_S)]
    fake_slurm.forget()
    later = SlurmExecutor(directory="/somewhere/else")  # handles say where the records are
    after = [later.poll(handle) for handle in handles]
    assert [_told(status)[:2] for status in after] == [told[:2] for told in before]
    assert [status.exit_code for status in after] == [0, 7, -15, 1]
    assert after[3].message == "ValueError: boom"
    assert sorted(executor.recover("run-1"), key=lambda h: int(h.metadata["job"])) == handles


def test_replica_without_a_record_is_lost_once_it_is_forgotten(
    fake_slurm: FakeCluster, executor: SlurmExecutor
) -> None:
    (handle,) = executor.launch_replicas(1, f"{PROGRAMS}:sleep", {}, options=NAMED)
    _until(lambda: "asleep" in executor.stream_logs(handle), "its start")
    fake_slurm.end(f"{handle.metadata['job']}_0", "NODE_FAIL")
    executor.collect([handle], timeout=PATIENCE_S)
    Path(handle.metadata["directory"], "exit").unlink(missing_ok=True)
    fake_slurm.forget()
    assert _told(SlurmExecutor().poll(handle)) == ("failed", "lost", None)


def test_job_id_that_slurm_has_given_again_is_not_the_replica(
    fake_slurm: FakeCluster, executor: SlurmExecutor
) -> None:
    (handle,) = executor.launch_replicas(1, f"{PROGRAMS}:sleep", {}, options=NAMED)
    stranger = ReplicaHandle(0, "slurm", {**handle.metadata, "job_name": "run-0.a0"})
    stranger.metadata["directory"] = "/nonexistent"
    assert _told(executor.poll(stranger)) == ("failed", "lost", None)
    executor.cancel(stranger)
    _until(lambda: executor.poll(handle) == "running", "the replica's own start")


def test_forget_leaves_nothing_on_the_disk(
    fake_slurm: FakeCluster, executor: SlurmExecutor, tmp_path: Path
) -> None:
    handles = executor.launch_replicas(2, f"{PROGRAMS}:tell", {}, options=NAMED)
    executor.collect(handles, timeout=PATIENCE_S)
    text, offset = executor.read_logs(handles[0])
    assert json.dumps({}) in text.decode()
    assert executor.read_logs(handles[0], offset) == (b"", offset)
    for handle in handles:
        executor.forget(handle)
    assert list((tmp_path / "shared").iterdir()) == []
