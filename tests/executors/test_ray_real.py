"""What the fake dashboard only claims, against a real Ray head, where ray is installed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from ray_fixtures import head_address, real_head

from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import LaunchOptions, ReplicaHandle, Script
from diloco_cloud.executors.ray import RayJobsExecutor

__all__ = ["head_address", "real_head"]

PROGRAMS = "diloco_cloud.testing.programs"
#: Generous: Ray starts a job in five seconds on an idle machine.
PATIENCE_S = 180.0
#: Takes its time to end, more than the three seconds that Ray gives by itself.
SLOW_TO_END = """\
import pathlib, signal, sys, time

def end(*_):
    time.sleep(5)
    pathlib.Path(sys.argv[1]).touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def executor(real_head: str) -> RayJobsExecutor:
    return RayJobsExecutor(address=real_head, python=sys.executable, cpus=0.1, grace=30)


def _until_printed(executor: RayJobsExecutor, handle: ReplicaHandle, text: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while text not in executor.stream_logs(handle).splitlines():
        assert time.monotonic() < deadline, executor.poll(handle).message
        time.sleep(0.2)


def test_jobs_end_as_their_replicas_do(executor: RayJobsExecutor) -> None:
    named = LaunchOptions(name="ends")
    (told,) = executor.launch_replicas(1, f"{PROGRAMS}:tell", {}, options=named)
    again = executor.launch_replicas(1, f"{PROGRAMS}:tell", {}, options=named)
    assert again == [told]  # Ray knows the id
    (left,) = executor.launch_replicas(1, f"{PROGRAMS}:leave", {"code": 7})
    (killed,) = executor.launch_replicas(1, f"{PROGRAMS}:kill_self", {"signum": 11})
    (slept,) = executor.launch_replicas(1, f"{PROGRAMS}:sleep", {}, timeout=2)
    results = executor.collect([told, left, killed, slept], timeout=PATIENCE_S)
    assert [(result.status, result.exit_code, result.status.reason) for result in results] == [
        ("succeeded", 0, None),
        ("failed", 7, "exit_code"),
        ("failed", -11, "exit_code"),
        ("failed", 124, "timeout"),
    ]
    assert executor.recover("ends") == [told]
    unknown = ReplicaHandle(0, "ray", {"submission_id": "nobody"})
    assert executor.poll(unknown).reason == "lost"


def test_stopped_replica_gets_its_grace(executor: RayJobsExecutor, tmp_path: Path) -> None:
    script, ended = tmp_path / "slow.py", tmp_path / "ended"
    script.write_text(SLOW_TO_END)
    (handle,) = executor.launch_replicas(1, Script(str(script), (str(ended),)), {})
    _until_printed(executor, handle, "up")
    executor.cancel(handle)
    (result,) = executor.collect([handle], timeout=PATIENCE_S)
    assert (result.status, result.status.reason) == ("cancelled", "cancelled")
    assert ended.exists()


def test_replica_that_fits_on_no_node_is_refused_once_the_nodes_are_known(
    executor: RayJobsExecutor,
) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not executor._api.nodes()[0]:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    with pytest.raises(ConfigError, match=r"accelerator_type:A100=0\.001") as caught:
        executor.check_launch(1, f"{PROGRAMS}:sleep", {}, gpu="A100")
    assert "CPU=8" in (caught.value.fix or "")
    executor.check_launch(1, f"{PROGRAMS}:sleep", {})
