"""What the Slurm executor asks for, what it does when a reply is lost, and what it refuses."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.slurm_cluster import Cluster, FakeCluster
from slurm_fixtures import fake_slurm, real_slurm, slurm

from diloco_cloud.errors import ConfigError, LaunchError
from diloco_cloud.executor import LaunchOptions
from diloco_cloud.executors.slurm import SlurmExecutor
from diloco_cloud.executors.slurm.commands import CommandError, Output, run_here
from diloco_cloud.executors.slurm.submission import compressed, gres

__all__ = ["fake_slurm", "real_slurm", "slurm"]

PROGRAMS = "diloco_cloud.testing.programs"
NAMED = LaunchOptions(name="run-1")


@pytest.fixture
def executor(tmp_path: Path) -> SlurmExecutor:
    return SlurmExecutor(directory=str(tmp_path / "shared"), sleep=lambda seconds: None)


def _preview(executor: SlurmExecutor, **changes: Any) -> dict[str, Any]:
    launch = {"gpu": None, "timeout": 3600, "options": NAMED, **changes}
    (request,) = executor.preview_launch(1, f"{PROGRAMS}:sleep", {}, **launch)
    return request


def test_preview_needs_no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    executor = SlurmExecutor(
        directory="/shared", partition="gpu", account="lab", cpus=8, memory=64, sbatch=["--nice"]
    )
    options = LaunchOptions(name="run-1", ranks=[5, 0, 1, 2], world_size=8, attempt=3)
    (request,) = executor.preview_launch(
        4, f"{PROGRAMS}:sleep", {}, gpu="a100:2", timeout=86_399, options=options
    )
    command = request["command"]
    assert command[:3] == ["sbatch", "--parsable", "--job-name=run-1.a3"]
    wanted = (
        *("--array=0-2,5", "--export=NONE", "--time=1440", "--requeue", "--signal=B:USR1@30"),
        *("--gres=gpu:a100:2", "--partition=gpu", "--account=lab", "--cpus-per-task=8"),
        *("--mem=64", "--nice"),
    )
    assert [option for option in wanted if option not in command] == []
    assert 'export REPLICA_RANK="$rank"' in request["stdin"]
    assert "export NUM_REPLICA_GROUPS=8" in request["stdin"]


def test_short_timeout_is_kept_by_the_script_alone(executor: SlurmExecutor) -> None:
    assert not any("--signal" in word for word in _preview(executor, timeout=120)["command"])


@pytest.mark.parametrize(
    ("gpu", "asked"), [("a100", "gpu:a100:1"), ("2", "gpu:2"), ("gpu:h100:8", "gpu:h100:8")]
)
def test_gpu_is_put_in_slurms_words(gpu: str, asked: str) -> None:
    assert gres(gpu) == asked


@pytest.mark.parametrize("gpu", ["", "0", "a100:0", "a100:x", "a100 2", ":2"])
def test_gpu_that_slurm_could_not_be_asked_for_is_refused(gpu: str) -> None:
    with pytest.raises(ConfigError, match="is not a GPU"):
        gres(gpu)


@pytest.mark.parametrize(
    ("ranks", "text"), [([0], "0"), ([0, 1, 2], "0-2"), ([7, 1, 0, 3], "0-1,3,7")]
)
def test_ranks_are_written_as_an_array(ranks: Sequence[int], text: str) -> None:
    assert compressed(ranks) == text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "login1"}, "needs a directory"),
        ({"directory": "relative"}, "absolute path"),
        ({"cpus": 0}, "at least 1"),
        ({"sbatch": "--nice"}, "list of options"),
    ],
)
def test_setting_that_cannot_work_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SlurmExecutor(**settings)
    assert words in str(caught.value)


# -- what only a cluster can tell ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "launch", "message", "fix"),
    [
        ({"partition": "nope"}, {}, "nvalid partition", "long, short"),
        ({}, {"gpu": "h100"}, "node configuration", "gpu:a100:3"),
        ({}, {"gpu": "a100:9"}, "node configuration", "gpu:a100:3"),
        ({"partition": "short"}, {"timeout": 7200}, "beyond the 1h", "partition=long"),
        ({}, {"timeout": 8 * 86_400}, "beyond the 168h", "--timeout 168h or less"),
        ({"sbatch": ["--no-such-option"]}, {}, "unrecognized option", "sbatch="),
        ({}, {"options": LaunchOptions(ranks=[1001], world_size=2000)}, "array", "MaxArraySize"),
    ],
)
def test_launch_that_cannot_work_is_refused_before_it_is_made(
    slurm: Cluster,
    tmp_path: Path,
    settings: dict[str, Any],
    launch: dict[str, Any],
    message: str,
    fix: str,
) -> None:
    executor = SlurmExecutor(directory=str(tmp_path / "shared"), **settings)
    for method in (executor.check_launch, executor.launch_replicas):
        with pytest.raises(ConfigError) as caught:
            method(1, f"{PROGRAMS}:sleep", {}, **launch)
        assert message in caught.value.message
        assert fix in (caught.value.fix or "")
    assert list(tmp_path.glob("shared/*")) == []


def test_launch_that_works_is_not_refused(slurm: Cluster, executor: SlurmExecutor) -> None:
    executor.check_launch(3, f"{PROGRAMS}:sleep", {}, gpu="a100", options=NAMED)
    assert executor.recover("run-1") == []


def test_machine_without_slurm_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, executor: SlurmExecutor
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for method in (executor.check_launch, executor.launch_replicas):
        with pytest.raises(ConfigError, match="Slurm cannot be used from here") as caught:
            method(1, f"{PROGRAMS}:sleep", {})
        assert "host=" in (caught.value.fix or "")


# -- lost replies ----------------------------------------------------------------------------------


def test_lost_reply_is_found_again(fake_slurm: FakeCluster, executor: SlurmExecutor) -> None:
    fake_slurm.configure(lose_reply=1)
    handles = executor.launch_replicas(2, f"{PROGRAMS}:tell", {}, options=NAMED)
    assert [handle.metadata["job"] for handle in handles] == ["1", "1"]
    assert [result.status for result in executor.collect(handles)] == ["succeeded", "succeeded"]
    assert len(fake_slurm.submissions()) == 1


def test_repeated_launch_starts_only_what_is_missing(
    fake_slurm: FakeCluster, executor: SlurmExecutor
) -> None:
    one = LaunchOptions(name="run-1", ranks=[1], world_size=3)
    (first,) = executor.launch_replicas(1, f"{PROGRAMS}:tell", {}, options=one)
    handles = executor.launch_replicas(3, f"{PROGRAMS}:tell", {}, options=NAMED)
    assert [handle.rank for handle in handles] == [0, 1, 2]
    assert handles[1] == first
    assert "--array=0,2" in fake_slurm.submissions()[1]
    again = executor.launch_replicas(3, f"{PROGRAMS}:tell", {}, options=NAMED)
    assert again == handles
    assert len(fake_slurm.submissions()) == 2


def test_launches_without_a_name_are_not_each_others_repetitions(
    fake_slurm: FakeCluster, executor: SlurmExecutor
) -> None:
    first, second = (executor.launch_replicas(1, f"{PROGRAMS}:tell", {}) for _ in range(2))
    assert first != second


def test_controller_that_is_down_leaves_nothing(
    fake_slurm: FakeCluster, executor: SlurmExecutor
) -> None:
    with fake_slurm.outage(), pytest.raises(LaunchError, match="Unable to contact"):
        executor.launch_replicas(1, f"{PROGRAMS}:sleep", {}, options=NAMED)
    assert executor.recover("run-1") == []


def test_reply_that_is_lost_for_good_touches_no_other_rank(
    fake_slurm: FakeCluster, executor: SlurmExecutor, tmp_path: Path
) -> None:
    def lost(argv: Sequence[str], stdin: str) -> Output:
        if argv[0] == "sbatch":
            raise CommandError("sbatch did not answer in 60 seconds")
        return run_here(argv, stdin)

    one, two = (LaunchOptions(name="run-1", ranks=[r], world_size=2, attempt=1) for r in (0, 1))
    handles = executor.launch_replicas(1, f"{PROGRAMS}:sleep", {}, options=one)
    settings = {"directory": str(tmp_path / "shared"), "sleep": lambda seconds: None}
    with pytest.raises(LaunchError, match="did not take the job"):
        SlurmExecutor(run=lost, **settings).launch_replicas(1, f"{PROGRAMS}:sleep", {}, options=two)
    assert executor.recover("run-1") == handles
    assert executor.collect(handles, timeout=0)[0].status in ("pending", "running")


def test_launcher_that_is_interrupted_cancels_what_it_may_have_submitted(
    fake_slurm: FakeCluster, tmp_path: Path
) -> None:
    def interrupted(argv: Sequence[str], stdin: str) -> Output:
        done = run_here(argv, stdin)
        if argv[0] == "sbatch":
            raise KeyboardInterrupt
        return done

    executor = SlurmExecutor(directory=str(tmp_path / "shared"), run=interrupted)
    with pytest.raises(KeyboardInterrupt):
        executor.launch_replicas(2, f"{PROGRAMS}:sleep", {}, options=NAMED)
    other = SlurmExecutor(directory=str(tmp_path / "shared"))
    results = other.collect(other.recover("run-1"), timeout=60)
    assert [result.status for result in results] == ["cancelled", "cancelled"]


# -- by ssh ----------------------------------------------------------------------------------------


def test_host_is_reached_by_ssh_alone(
    fake_slurm: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything, files too, goes through one ssh, which here runs it in a clean environment."""
    monkeypatch.setenv("CONTRACT_SECRET", "hush")
    ssh = Path(os.environ["PATH"].split(os.pathsep)[0], "ssh")
    exports = " ".join(f"{name}='{value}'" for name, value in fake_slurm.env.items())
    ssh.write_text(
        '#!/bin/sh\nshift 2; [ "$1" = login1 ] || { echo "no route" >&2; exit 255; }\n'
        f'shift 2; cd / && exec env -i {exports} HOME="$HOME" sh -c "$*"\n'
    )
    ssh.chmod(0o755)
    settings = {"directory": str(tmp_path / "far"), "python": sys.executable}
    executor = SlurmExecutor(host="login1", **settings)
    options = LaunchOptions(name="run-1", secrets=["CONTRACT_SECRET"], env={"A": "a 'b' $c"})
    handles = executor.launch_replicas(
        2, f"{PROGRAMS}:identify", {"names": ["CONTRACT_SECRET", "A"]}, options=options
    )
    assert [result.status for result in executor.collect(handles)] == ["succeeded", "succeeded"]
    assert '"CONTRACT_SECRET": "hush", "A": "a \'b\' $c"' in executor.stream_logs(handles[1])
    nowhere = SlurmExecutor(host="login2", **settings)
    status = nowhere.poll(handles[0])
    assert (status, "no route" in status.message) == ("unknown", True)


# -- secrets ---------------------------------------------------------------------------------------


def test_secrets_are_a_file_of_the_users_own_and_gone_in_the_end(
    fake_slurm: FakeCluster,
    executor: SlurmExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CONTRACT_SECRET", "it's\nhushed")
    fake_slurm.configure(queue_s=1.0)
    options = LaunchOptions(name="run-1", secrets=["CONTRACT_SECRET"])
    (handle,) = executor.launch_replicas(
        1, f"{PROGRAMS}:identify", {"names": ["CONTRACT_SECRET"]}, options=options
    )
    (secrets,) = tmp_path.rglob("secrets")
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    assert stat.S_IMODE(secrets.parent.stat().st_mode) == 0o700
    (result,) = executor.collect([handle])
    assert result.status == "succeeded"
    assert '"it\'s\\nhushed"' in executor.stream_logs(handle)
    assert not secrets.exists()
    assert b"hushed" not in fake_slurm.kept()
