"""What the Ray executor asks for, what it does when a reply is lost, and what it refuses."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fakes.ray_dashboard import FakeDashboard
from ray_fixtures import dashboard
from servers import free_ports

from diloco_cloud.errors import ConfigError, LaunchError
from diloco_cloud.executor import LaunchOptions, ReplicaHandle
from diloco_cloud.executors.ray import RayJobsExecutor
from diloco_cloud.executors.ray.submission import Gpu, parse_gpu

__all__ = ["dashboard"]

PROGRAMS = "diloco_cloud.testing.programs"
NAMED = LaunchOptions(name="run-1")


@pytest.fixture
def executor(dashboard: FakeDashboard) -> RayJobsExecutor:
    return _executor(dashboard)


def _executor(dashboard: FakeDashboard, **settings: Any) -> RayJobsExecutor:
    given = {"python": sys.executable, "grace": 2, **settings}
    return RayJobsExecutor(address=dashboard.address, sleep=lambda seconds: None, **given)


def _collected(executor: RayJobsExecutor, handles: list[ReplicaHandle]) -> list[str]:
    waiting = RayJobsExecutor(address=executor._api.address)  # whose clock does wait
    return [str(result.status) for result in waiting.collect(handles, timeout=60)]


def test_preview_needs_no_cluster() -> None:
    executor = RayJobsExecutor(
        address="head:8265",
        cpus=4,
        resources={"lab": 1},
        runtime_env={"working_dir": "s3://b/code.zip", "env_vars": {"A": "1", "B": "2"}},
    )
    options = LaunchOptions(name="run-1", ranks=[5, 0], world_size=8, attempt=3, env={"B": "3"})
    first, second = executor.preview_launch(
        2, f"{PROGRAMS}:sleep", {}, gpu="A100:2", timeout=7200, options=options
    )
    assert first["submission_id"].startswith("run-1.r5.a3.")
    assert first["metadata"] == {"diloco_run": "run-1", "diloco_rank": "5", "diloco_attempt": "3"}
    assert (first["entrypoint_num_cpus"], first["entrypoint_num_gpus"]) == (4, 2)
    assert first["entrypoint_resources"] == {"lab": 1, "accelerator_type:A100": 0.001}
    assert first["runtime_env"]["working_dir"] == "s3://b/code.zip"
    variables = first["runtime_env"]["env_vars"]
    assert (variables["A"], variables["B"], variables["REPLICA_RANK"]) == ("1", "3", "5")
    assert variables["RAY_JOB_STOP_WAIT_TIME_S"] == "30"
    assert first["entrypoint"] == second["entrypoint"]
    assert "--timeout=7200" in first["entrypoint"]


@pytest.mark.parametrize(
    ("gpu", "asked"),
    [
        (None, Gpu()),
        ("2", Gpu(2)),
        ("A100", Gpu(1, "A100")),
        ("TPU-V4:4", Gpu(4, "TPU-V4")),
    ],
)
def test_gpu_is_put_in_rays_words(gpu: str | None, asked: Gpu) -> None:
    assert parse_gpu(gpu) == asked


@pytest.mark.parametrize("gpu", ["", "0", "A100:0", "A100:x", "A100 2", ":2"])
def test_gpu_that_ray_could_not_be_asked_for_is_refused(gpu: str) -> None:
    with pytest.raises(ConfigError, match="is not a GPU"):
        parse_gpu(gpu)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cpus": 0}, "must be positive"),
        ({"secrets_dir": "relative"}, "absolute path"),
        ({"cluster_secrets": "HF_TOKEN"}, "list of names"),
        ({"address": "ray://head:10001"}, "HTTP address"),
        ({"address": "http://me:hush@head:8265"}, "RAY_JOB_HEADERS"),
    ],
)
def test_setting_that_cannot_work_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RayJobsExecutor(**settings)
    assert words in str(caught.value)
    assert "hush" not in str(caught.value)


# -- what the cluster has --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "gpu"),
    [({"cpus": 9}, None), ({}, "1"), ({}, "A100"), ({"resources": {"x": 1}}, None)],
)
def test_replica_that_fits_on_no_node_is_refused(
    dashboard: FakeDashboard, settings: dict[str, Any], gpu: str | None
) -> None:
    executor = _executor(dashboard, **settings)
    with pytest.raises(ConfigError, match="which no node of this Ray cluster has") as caught:
        executor.check_launch(1, f"{PROGRAMS}:sleep", {}, gpu=gpu, options=NAMED)
    assert "There are: CPU=8." in (caught.value.fix or "")
    dashboard.autoscales = True
    executor.check_launch(1, f"{PROGRAMS}:sleep", {}, gpu=gpu, options=NAMED)


def test_replica_that_fits_is_not_refused(dashboard: FakeDashboard) -> None:
    dashboard.resources |= {"GPU": 2.0, "accelerator_type:A100": 1.0}
    _executor(dashboard).check_launch(3, f"{PROGRAMS}:sleep", {}, gpu="A100:2", options=NAMED)


def test_recovery_says_which_cluster_was_asked(
    dashboard: FakeDashboard,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert RayJobsExecutor(address=dashboard.address).recover("run-1") == []  # as it is recorded
    assert caplog.text == ""
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", dashboard.address)
    assert RayJobsExecutor().recover("run-1") == []
    assert f"Ray at {dashboard.address} remembers no job of run-1" in caplog.text
    assert "set RAY_API_SERVER_ADDRESS" in caplog.text


# -- lost replies ----------------------------------------------------------------------------------


def test_lost_reply_costs_nothing(dashboard: FakeDashboard, executor: RayJobsExecutor) -> None:
    dashboard.lost_replies = 1
    handles = executor.launch_replicas(2, f"{PROGRAMS}:tell", {}, options=NAMED)
    assert _collected(executor, handles) == ["succeeded", "succeeded"]
    assert len(executor.recover("run-1")) == 2


def test_repeated_launch_finds_the_first_ones_jobs(
    dashboard: FakeDashboard, executor: RayJobsExecutor
) -> None:
    first, second = (
        executor.launch_replicas(2, f"{PROGRAMS}:tell", {}, options=NAMED) for _ in range(2)
    )
    assert first == second
    unnamed = [executor.launch_replicas(1, f"{PROGRAMS}:tell", {}) for _ in range(2)]
    assert unnamed[0] != unnamed[1]


def test_busy_head_is_asked_again(dashboard: FakeDashboard, executor: RayJobsExecutor) -> None:
    dashboard.outages = 2
    handles = executor.launch_replicas(1, f"{PROGRAMS}:tell", {}, options=NAMED)
    assert _collected(executor, handles) == ["succeeded"]


def test_cluster_whose_agents_are_still_starting_is_asked_again(
    dashboard: FakeDashboard, executor: RayJobsExecutor
) -> None:
    dashboard.agentless = 2
    handles = executor.launch_replicas(1, f"{PROGRAMS}:tell", {}, options=NAMED)
    assert _collected(executor, handles) == ["succeeded"]
    dashboard.agentless = 4
    with pytest.raises(LaunchError, match="No available agent"):
        executor.launch_replicas(1, f"{PROGRAMS}:tell", {})


def test_head_that_goes_away_leaves_nothing_that_can_be_reached(
    dashboard: FakeDashboard, executor: RayJobsExecutor
) -> None:
    def cut(handle: ReplicaHandle) -> None:
        dashboard.outages = 4  # the second submission; the stops that follow get through

    options = LaunchOptions(name="run-1", on_launched=cut)
    with pytest.raises(LaunchError, match="answers 503"):
        executor.launch_replicas(3, f"{PROGRAMS}:sleep", {}, options=options)
    (left,) = executor.recover("run-1")
    assert _collected(executor, [left]) == ["cancelled"]


def test_launcher_that_was_killed_leaves_nothing_that_cannot_be_found(
    dashboard: FakeDashboard, executor: RayJobsExecutor
) -> None:
    code = (
        "import os, sys\n"
        "from diloco_cloud.executor import LaunchOptions\n"
        "from diloco_cloud.executors.ray import RayJobsExecutor\n"
        "def die(handle):\n    if handle.rank == 1:\n        os._exit(9)\n"
        f"executor = RayJobsExecutor(address={dashboard.address!r}, python=sys.executable)\n"
        "options = LaunchOptions(name='run-1', on_launched=die)\n"
        f"executor.launch_replicas(4, '{PROGRAMS}:sleep', {{}}, options=options)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert done.returncode == 9
    found = executor.recover("run-1")
    assert [handle.rank for handle in found] == [0, 1]
    for handle in found:
        executor.cancel(handle)
    assert _collected(executor, found) == ["cancelled", "cancelled"]


def test_cluster_that_is_not_there_says_what_to_check() -> None:
    address = f"http://127.0.0.1:{free_ports(1)[0]}"
    executor = RayJobsExecutor(address=address, sleep=lambda seconds: None)
    for launch in (executor.check_launch, executor.launch_replicas):
        with pytest.raises(LaunchError, match=address) as caught:
            launch(1, f"{PROGRAMS}:sleep", {})
        assert "address=" in (caught.value.fix or "")


def test_token_is_sent_and_not_kept(
    dashboard: FakeDashboard, executor: RayJobsExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard.token = "hush-hush"
    with pytest.raises(ConfigError, match="does not let us in") as caught:
        executor.launch_replicas(1, f"{PROGRAMS}:tell", {})
    assert "RAY_AUTH_TOKEN" in (caught.value.fix or "")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "hush-hush")
    (handle,) = executor.launch_replicas(1, f"{PROGRAMS}:tell", {})
    assert _collected(executor, [handle]) == ["succeeded"]
    assert "hush" not in json.dumps(handle.metadata) + repr(vars(executor))
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    status = RayJobsExecutor(address=dashboard.address).poll(handle)
    assert (status, "Unauthorized" in status.message) == ("unknown", True)


# -- ends ------------------------------------------------------------------------------------------


def test_job_without_resources_waits_and_can_be_cancelled(
    dashboard: FakeDashboard, executor: RayJobsExecutor
) -> None:
    dashboard.held.set()
    first, second = executor.launch_replicas(2, f"{PROGRAMS}:sleep", {}, options=NAMED)
    assert executor.poll(first) == "pending"
    executor.cancel(first)
    dashboard.give_up(second.metadata["submission_id"])
    dashboard.held.clear()
    assert _collected(executor, [first, second]) == ["cancelled", "failed"]
    executor._jobs.forget_answer()
    assert executor.poll(second).reason == "no_capacity"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("The node is dead.", "lost"),
        ("The node was preempted.", "preempted"),
        ("Task was killed due to the node running low on memory.", "out_of_memory"),
    ],
)
def test_job_that_dies_with_its_node_says_why(
    dashboard: FakeDashboard, executor: RayJobsExecutor, message: str, reason: str
) -> None:
    (handle,) = executor.launch_replicas(1, f"{PROGRAMS}:sleep", {}, options=NAMED)
    dashboard.lose_node(handle.metadata["submission_id"], message)
    executor._jobs.forget_answer()
    status = executor.poll(handle)
    assert (status, status.reason, status.exit_code) == ("failed", reason, None)


# -- secrets ---------------------------------------------------------------------------------------


def test_secret_without_a_way_is_refused(
    dashboard: FakeDashboard, executor: RayJobsExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTRACT_SECRET", "hush")
    options = LaunchOptions(name="run-1", secrets=["CONTRACT_SECRET"])
    for method in (executor.preview_launch, executor.launch_replicas):
        with pytest.raises(ConfigError, match="no channel for secrets") as caught:
            method(1, f"{PROGRAMS}:sleep", {}, options=options)
        assert "cluster_secrets" in (caught.value.fix or "")
    assert dashboard.bodies() == []


def test_secret_of_the_cluster_is_not_sent(
    dashboard: FakeDashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTRACT_SECRET", "hush-here")
    executor = _executor(dashboard, cluster_secrets=["CONTRACT_SECRET"])
    options = LaunchOptions(name="run-1", secrets=["CONTRACT_SECRET"])
    asked = (1, f"{PROGRAMS}:identify", {"names": ["CONTRACT_SECRET"]})
    (handle,) = executor.launch_replicas(*asked, options=options)
    assert _collected(executor, [handle]) == ["failed"]  # the nodes do not have it
    assert "this Ray node has no CONTRACT_SECRET" in executor.stream_logs(handle)
    dashboard._nodes_env["CONTRACT_SECRET"] = "hush-there"
    (handle,) = executor.launch_replicas(
        *asked, options=LaunchOptions(name="run-1", attempt=1, secrets=["CONTRACT_SECRET"])
    )
    assert _collected(executor, [handle]) == ["succeeded"]
    assert '"CONTRACT_SECRET": "hush-there"' in executor.stream_logs(handle)
    assert "hush-here" not in json.dumps(dashboard.requests)


def test_secrets_file_is_the_users_own_and_taken_by_the_replica(
    dashboard: FakeDashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTRACT_SECRET", "hush")
    shared = tmp_path / "shared"
    executor = _executor(dashboard, secrets_dir=str(shared))
    dashboard.held.set()
    (handle,) = executor.launch_replicas(
        1,
        f"{PROGRAMS}:identify",
        {"names": ["CONTRACT_SECRET"]},
        options=LaunchOptions(name="run-1", secrets=["CONTRACT_SECRET"]),
    )
    (file,) = shared.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(shared.stat().st_mode) == 0o700
    dashboard.held.clear()
    assert _collected(executor, [handle]) == ["succeeded"]
    assert list(shared.iterdir()) == []
    assert "hush" not in json.dumps(dashboard.requests)


def test_secrets_that_nobody_took_are_released_with_the_run(
    dashboard: FakeDashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTRACT_SECRET", "hush")
    shared = tmp_path / "shared"
    executor = _executor(dashboard, secrets_dir=str(shared))
    options = LaunchOptions(name="run-1", secrets=["CONTRACT_SECRET"])

    def launch() -> ReplicaHandle:
        (handle,) = executor.launch_replicas(1, f"{PROGRAMS}:sleep", {}, options=options)
        return handle

    handle = launch()
    _until_there_are(shared, 0)  # the job has taken its file
    launch()  # repeated: the job is there already, and takes no other
    (again,) = shared.iterdir()
    dead = shared / "run-1.r1.a0.0123abcd"  # of a launcher that died before it had a job
    part = shared / ".run-1.r2.a0.0123abcd.x1y2z3"  # or while it wrote
    fresh = shared / "run-1.r3.a0.0123abcd"  # of one that is about to have one
    other = shared / "run-1.r1-b.r0.a0.0123abcd"
    for path in (dead, part, fresh, other):
        path.write_text("{}")
    for path in (again, dead, part, other):
        os.utime(path, (0, 0))
    executor.release("run-1")
    assert sorted(shared.iterdir()) == sorted([again, fresh, other])
    executor.cancel(handle)
    again.touch()
    assert _collected(executor, [handle]) == ["cancelled"]
    executor.release("run-1")
    assert sorted(shared.iterdir()) == sorted([fresh, other])
    _executor(dashboard, secrets_dir=str(tmp_path / "nowhere")).release("run-1")
    executor.release("run-2")


def _until_there_are(directory: Path, files: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(directory.iterdir())) != files:
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)
