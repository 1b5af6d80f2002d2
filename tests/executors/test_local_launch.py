"""What a local replica is given, runs and returns."""

from __future__ import annotations

import functools
import json
import os
import signal
from pathlib import Path

import pytest
import replica_programs
from local_processes import wait_until

from diloco_cloud.errors import ConfigError, LaunchError, TrainerImportError
from diloco_cloud.executor import (
    LaunchOptions,
    ReplicaHandle,
    ReplicaStatus,
    Script,
    ServerlessExecutor,
)
from diloco_cloud.executors.local import LocalProcessExecutor

FOUR_RANKS = [0, 1, 2, 3]


def test_executor_without_arguments_conforms() -> None:
    executor = LocalProcessExecutor()
    assert isinstance(executor, ServerlessExecutor)
    assert executor.backend_name == "local_process"
    assert executor.supports_inter_replica_network is True


def test_launch_returns_handles_in_rank_order(local: LocalProcessExecutor) -> None:
    handles = local.launch_replicas(4, "replica_programs:echo", {"x": 1})
    assert [handle.rank for handle in handles] == FOUR_RANKS
    assert all(handle.backend_name == "local_process" for handle in handles)
    assert all(handle.metadata["pid"] > 0 for handle in handles)
    assert all(handle.metadata["start_ts"] > 1.7e9 for handle in handles)
    results = local.collect(handles, timeout=30)
    assert [result["rank"] for result in results] == FOUR_RANKS


@pytest.mark.parametrize(
    ("entrypoint", "expected"),
    [
        ("replica_programs", {"main": {"x": [1, None, "ü"]}}),
        ("replica_programs:echo", {"x": [1, None, "ü"]}),
        ("replica_programs.echo", {"x": [1, None, "ü"]}),
        (replica_programs.echo, {"x": [1, None, "ü"]}),
        (functools.partial(replica_programs.echo, y=2), {"x": [1, None, "ü"], "y": 2}),
    ],
)
def test_entrypoint_is_called_with_arguments(
    local: LocalProcessExecutor, entrypoint: object, expected: dict[str, object]
) -> None:
    handles = local.launch_replicas(1, entrypoint, {"x": [1, None, "ü"]})  # type: ignore[arg-type]
    (result,) = local.collect(handles, timeout=30)
    assert result == {
        "rank": 0,
        "status": "succeeded",
        "exit_code": 0,
        "error": None,
        "result": expected,
    }


def test_script_gets_its_arguments_and_rank(local: LocalProcessExecutor, tmp_path: Path) -> None:
    script = tmp_path / "train me.py"
    script.write_text("import os, sys; print(sys.argv[1:], os.environ['MY_RANK'])")
    entrypoint = Script(str(script), ("+algorithm.diloco=x y", "--n", "1"))
    handles = local.launch_replicas(2, entrypoint, {"rank_env": "MY_RANK"})
    assert [result["status"] for result in local.collect(handles, timeout=30)] == ["succeeded"] * 2
    assert local.stream_logs(handles[1]) == "['+algorithm.diloco=x y', '--n', '1'] 1\n"


def test_relative_import_path_reaches_replica(
    local: LocalProcessExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def main():\n    return __file__\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    handles = local.launch_replicas(1, "only_here", {})
    assert local.collect(handles, timeout=30)[0]["result"] == str(tmp_path / "only_here.py")


def test_callable_result_keeps_its_type(local: LocalProcessExecutor) -> None:
    handles = local.launch_replicas(2, replica_programs.rank_as_tuple, {})
    results = local.collect(handles, timeout=30)
    assert [result["result"] for result in results] == [("rank", 0), ("rank", 1)]


def test_result_that_is_not_json_is_kept_for_callables_only(local: LocalProcessExecutor) -> None:
    handles = [
        *local.launch_replicas(1, replica_programs.not_json, {}),
        *local.launch_replicas(1, "replica_programs:not_json", {}),
    ]
    kept, dropped = local.collect(handles, timeout=30)
    assert kept["result"] == {1, 2}
    assert (dropped["status"], dropped["result"]) == ("succeeded", None)
    assert "a set, is not JSON" in local.stream_logs(handles[1])


def _environment(
    local: LocalProcessExecutor,
    *names: str,
    options: LaunchOptions = LaunchOptions(),  # noqa: B008
    n_replicas: int = 1,
    **arguments: object,
) -> list[dict[str, str | None]]:
    handles = local.launch_replicas(
        n_replicas,
        "replica_programs:environment",
        {"names": list(names), **arguments},
        options=options,
    )
    return [result["result"] for result in local.collect(handles, timeout=30)]


def test_replicas_know_who_they_are(
    local: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "of the launcher")
    monkeypatch.setenv("REPLICA_RANK", "of the launcher")
    seen = _environment(
        local,
        "REPLICA_RANK",
        "REPLICA_GROUP_ID",
        "NUM_REPLICA_GROUPS",
        "DILOCO_ATTEMPT",
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "TORCHELASTIC_RUN_ID",
        options=LaunchOptions(ranks=[2, 1], world_size=5, attempt=3),
        n_replicas=2,
    )
    assert [list(replica.values()) for replica in seen] == [
        ["2", "2", "5", "3", None, None, None, None],
        ["1", "1", "5", "3", None, None, None, None],
    ]


def test_rank_env_renames_the_variable(local: LocalProcessExecutor) -> None:
    names = ("WHO_AM_I", "REPLICA_RANK", "DILOCO_RANK_ENV")
    first, second = _environment(local, *names, n_replicas=2, rank_env="WHO_AM_I")
    assert list(first.values()) == ["0", "0", "WHO_AM_I"]
    assert list(second.values()) == ["1", "1", "WHO_AM_I"]


def test_replica_has_one_cpu_thread_unless_told_otherwise(
    local: LocalProcessExecutor, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    options = LaunchOptions(env={"OPENBLAS_NUM_THREADS": "5"})
    assert list(_environment(local, *names, options=options)[0].values()) == ["1", "3", "5"]
    two = LocalProcessExecutor(state_dir=state_dir, cpu_threads=2)
    assert list(_environment(two, *names)[0].values()) == ["2", "3", "2"]


def test_devices_are_dealt_out_round_robin(
    local: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc")
    seen = _environment(local, "CUDA_VISIBLE_DEVICES", n_replicas=3)
    assert [replica["CUDA_VISIBLE_DEVICES"] for replica in seen] == ["3", "GPU-abc", "3"]


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_devices_stay_hidden(
    local: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    (seen,) = _environment(local, "CUDA_VISIBLE_DEVICES")
    assert seen["CUDA_VISIBLE_DEVICES"] == hidden


def test_gpu_warns_and_changes_nothing(local: LocalProcessExecutor) -> None:
    with pytest.warns(UserWarning, match="gpu='H100' has no effect"):
        handles = local.launch_replicas(1, "replica_programs", {}, gpu="H100")
    assert local.collect(handles, timeout=30)[0]["status"] == "succeeded"


def test_secret_reaches_replica_and_no_file_or_argument(
    local: LocalProcessExecutor, state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "hf_t0psecret"
    monkeypatch.setenv("TEST_TOKEN", secret)
    go_on = tmp_path / "go_on"
    options = LaunchOptions(secrets=["TEST_TOKEN"])
    running = local.launch_replicas(
        1, "replica_programs:wait_for_file", {"path": str(go_on)}, options=options
    )
    found = running[0].metadata
    for pid in (found["pid"], found["runner_pid"]):
        assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        environ = Path(f"/proc/{pid}/environ")  # empty until exec is done
        wait_until(lambda: f"TEST_TOKEN={secret}".encode() in environ.read_bytes())  # noqa: B023
    go_on.touch()
    local.collect(running, timeout=30)
    files = [path for path in state_dir.rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert secret not in json.dumps(found)


def test_state_is_private(local: LocalProcessExecutor) -> None:
    (handle,) = local.launch_replicas(1, "replica_programs", {})
    directory = Path(handle.metadata["directory"])
    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory.parent.stat().st_mode & 0o777 == 0o700


def test_state_directory_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    options = LaunchOptions(name="my run/1")
    (by_home,) = LocalProcessExecutor().launch_replicas(1, "replica_programs", {}, options=options)
    monkeypatch.delenv("DILOCO_HOME")
    (by_xdg,) = LocalProcessExecutor().launch_replicas(1, "replica_programs", {})
    LocalProcessExecutor().collect([by_home, by_xdg], timeout=30)
    assert Path(by_home.metadata["directory"]).match(f"{tmp_path}/home/local/my-run-1-*/0.0")
    assert Path(by_xdg.metadata["directory"]).match(f"{tmp_path}/xdg/diloco-cloud/local/*/0.0")


@pytest.mark.parametrize(
    ("entrypoint", "arguments", "error"),
    [
        (lambda: None, {}, ConfigError),
        (replica_programs.echo, {"x": lambda: None}, ConfigError),
        (replica_programs.fail, {"wrong": 1}, ConfigError),
        ("train.py", {}, ConfigError),
        ("no_such_module_anywhere", {}, TrainerImportError),
        ("replica_programs:no_such_function", {}, TrainerImportError),
        ("replica_programs:echo", {"x": {1}}, ConfigError),
        (Script("/no/such/script.py"), {}, TrainerImportError),
    ],
)
def test_bad_request_starts_nothing(
    local: LocalProcessExecutor,
    state_dir: Path,
    entrypoint: object,
    arguments: dict[str, object],
    error: type[Exception],
) -> None:
    with pytest.raises(error):
        local.launch_replicas(2, entrypoint, arguments)  # type: ignore[arg-type]
    assert not list(state_dir.glob("*"))


def test_state_directory_that_cannot_be_written_is_a_launch_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    executor = LocalProcessExecutor(state_dir=tmp_path / "file")
    with pytest.raises(LaunchError, match="cannot be written"):
        executor.launch_replicas(1, "replica_programs", {})


def test_partial_launch_is_rolled_back(local: LocalProcessExecutor, state_dir: Path) -> None:
    launched: list[ReplicaHandle] = []

    def obstruct(handle: ReplicaHandle) -> None:
        launched.append(handle)
        if handle.rank == 1:
            Path(handle.metadata["directory"]).with_name("2.0").touch()

    with pytest.raises(LaunchError, match="replica 2 did not start"):
        local.launch_replicas(
            4, "replica_programs:sleep", {}, options=LaunchOptions(on_launched=obstruct)
        )
    assert [handle.rank for handle in launched] == [0, 1]
    assert [local.poll(handle) for handle in launched] == ["cancelled", "cancelled"]


def test_failing_on_launched_rolls_back_and_keeps_its_error(local: LocalProcessExecutor) -> None:
    launched: list[ReplicaHandle] = []

    def refuse(handle: ReplicaHandle) -> None:
        launched.append(handle)
        raise FileNotFoundError("the record cannot be written")

    with pytest.raises(FileNotFoundError, match="the record"):
        local.launch_replicas(
            2, "replica_programs:sleep", {}, options=LaunchOptions(on_launched=refuse)
        )
    assert [local.poll(handle) for handle in launched] == ["cancelled"]


@pytest.mark.parametrize(
    ("entrypoint", "arguments", "exit_code", "reason", "message"),
    [
        ("fail", {"message": "boom\nand more"}, 1, "exit_code", "ValueError: boom"),
        ("run_out_of_memory", {}, 1, "out_of_memory", "MemoryError"),
        ("leave", {"code": 7}, 7, "exit_code", "exited with code 7"),
        ("leave_at_once", {"code": 137}, 137, "exit_code", "exited with code 137"),
        ("kill_self", {"signum": int(signal.SIGSEGV)}, -11, "exit_code", "killed by SIGSEGV"),
        ("kill_self", {"signum": int(signal.SIGKILL)}, -9, "exit_code", "killed by SIGKILL"),
    ],
)
def test_crash_is_a_failure_with_its_exit_code(
    local: LocalProcessExecutor,
    entrypoint: str,
    arguments: dict[str, object],
    exit_code: int,
    reason: str,
    message: str,
) -> None:
    handles = local.launch_replicas(1, f"replica_programs:{entrypoint}", arguments)
    (result,) = local.collect(handles, timeout=30)
    status: ReplicaStatus = result["status"]
    assert (status, status.exit_code, status.reason) == ("failed", exit_code, reason)
    assert status.message.startswith(message)
    assert result["error"].startswith(message)
    assert result["error"].endswith(f"(log: {handles[0].metadata['directory']}/log.txt)")
    assert result["exit_code"] == exit_code
    assert result["result"] is None


def test_failing_script_reports_its_last_line(local: LocalProcessExecutor, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("1 / 0")
    handles = local.launch_replicas(1, Script(str(script)), {})
    (result,) = local.collect(handles, timeout=30)
    assert result["error"].startswith("ZeroDivisionError: division by zero (log:")


def test_one_crash_hides_no_other_replica(local: LocalProcessExecutor) -> None:
    handles = local.launch_replicas(3, "replica_programs:fail_on_rank", {"rank": 1})
    results = local.collect(handles, timeout=30)
    assert [result["status"] for result in results] == ["succeeded", "failed", "succeeded"]
    assert [result["result"] for result in results] == ["good", None, "good"]
    assert [result.replica_id for result in results] == [0, 1, 2]
    assert results[1].exit_code == 1


def test_replica_has_no_terminal_and_its_own_group(local: LocalProcessExecutor) -> None:
    (handle,) = local.launch_replicas(1, "replica_programs:sleep", {})
    found = handle.metadata
    assert os.getpgid(found["pid"]) == found["pid"]
    assert os.getsid(found["pid"]) == os.getsid(found["runner_pid"]) != os.getsid(0)
    assert os.readlink(f"/proc/{found['pid']}/fd/0") == os.devnull
