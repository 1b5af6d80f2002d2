"""The warm executor against the contract: real processes, forked from a zygote without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_cloud.chaos.records import WarmReplica
from diloco_cloud.chaos.warm import WarmProcessExecutor
from diloco_cloud.errors import LaunchError
from diloco_cloud.executor import LaunchOptions, ReplicaHandle, Script, ServerlessExecutor

PATIENCE = 20.0


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[WarmProcessExecutor]:
    with WarmProcessExecutor(tmp_path / "state", preload=(), grace=0.2) as executor:
        yield executor


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def start(executor: WarmProcessExecutor, function: str, **arguments: Any) -> ReplicaHandle:
    (handle,) = executor.launch_replicas(1, f"warm_programs:{function}", arguments)
    return handle


def pid(handle: ReplicaHandle) -> int:
    replica = WarmReplica.of(handle)
    assert replica is not None
    return replica.pid


def is_gone(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"  # what became of it is for its new parent to ask


def test_it_is_an_executor(warm: WarmProcessExecutor) -> None:
    assert isinstance(warm, ServerlessExecutor)


def test_replicas_get_their_identity_and_return_their_results(
    warm: WarmProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "s3")
    names = [
        "REPLICA_RANK",
        "NUM_REPLICA_GROUPS",
        "DILOCO_ATTEMPT",
        "A_SECRET",
        "DILOCO_TERM_GRACE_S",
    ]
    launched: list[ReplicaHandle] = []
    options = LaunchOptions(
        ranks=[1, 3],
        world_size=4,
        attempt=2,
        env={"B": "c"},
        secrets=["A_SECRET"],
        on_launched=launched.append,
    )
    handles = warm.launch_replicas(
        2, "warm_programs:environment", {"names": [*names, "B"]}, options=options
    )
    assert handles == launched
    results = warm.collect(handles, timeout=PATIENCE)
    assert [result["status"] for result in results] == ["succeeded"] * 2
    assert [list(result["result"].values()) for result in results] == [
        ["1", "4", "2", "s3", "0.2", "c"],
        ["3", "4", "2", "s3", "0.2", "c"],
    ]


def test_logs_are_the_last_lines(warm: WarmProcessExecutor) -> None:
    handle = start(warm, "speak", a=1)
    (result,) = warm.collect([handle], timeout=PATIENCE)
    assert result["result"] == {"a": 1}
    assert warm.stream_logs(handle).splitlines() == [
        *(f"line {number} of replica 0" for number in range(3)),
        "and an error",
    ]
    assert warm.stream_logs(handle, n_lines=2) == "line 2 of replica 0\nand an error\n"


def test_a_script_runs(warm: WarmProcessExecutor, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(__name__, sys.argv[1])\n")
    handles = warm.launch_replicas(1, Script(str(script), ("x",)), {})
    assert warm.collect(handles, timeout=PATIENCE)[0]["exit_code"] == 0
    assert warm.stream_logs(handles[0]) == "__main__ x\n"


def test_failures_say_why(warm: WarmProcessExecutor) -> None:
    handles = [start(warm, "fail"), start(warm, "leave", code=3)]
    failed, left = (result["status"] for result in warm.collect(handles, timeout=PATIENCE))
    assert (failed, failed.exit_code, failed.reason) == ("failed", 1, "exit_code")
    assert failed.message == "ValueError: on purpose"
    assert "raise ValueError" in warm.stream_logs(handles[0])
    assert (left, left.exit_code) == ("failed", 3)


def test_a_killed_replica_has_failed_by_the_signal(warm: WarmProcessExecutor) -> None:
    handle = start(warm, "sleep")
    assert warm.running("diloco", 0) == WarmReplica.of(handle)
    os.kill(pid(handle), signal.SIGKILL)
    status = warm.collect([handle], timeout=PATIENCE)[0]["status"]
    assert (status, status.exit_code) == ("failed", -signal.SIGKILL)
    assert warm.running("diloco", 0) is None


@pytest.mark.parametrize("function", ["sleep", "ignore_sigterm"])
@pytest.mark.parametrize("stopped", [False, True])
def test_cancel_ends_whatever_it_does(
    warm: WarmProcessExecutor, tmp_path: Path, function: str, stopped: bool
) -> None:
    handle = start(warm, function, ready=str(tmp_path / "ready"))
    wait_until((tmp_path / "ready").exists)
    if stopped:
        os.kill(pid(handle), signal.SIGSTOP)
    # Another object, as in another process, can ask for it.
    WarmProcessExecutor(tmp_path / "state").cancel(handle)
    status = warm.collect([handle], timeout=PATIENCE)[0]["status"]
    assert (status, status.reason) == ("cancelled", "cancelled")
    warm.cancel(handle)  # again


def test_timeout_ends_a_replica(warm: WarmProcessExecutor) -> None:
    handles = warm.launch_replicas(1, "warm_programs:sleep", {}, timeout=0.1)
    status = warm.collect(handles, timeout=PATIENCE)[0]["status"]
    assert (status, status.reason) == ("failed", "timeout")


def test_collect_gives_up_at_its_timeout(warm: WarmProcessExecutor) -> None:
    handle = start(warm, "sleep")
    (result,) = warm.collect([handle], timeout=0.05)
    assert result["status"] == "running"
    assert "still running" in result["error"]


def test_modules_are_there_before_the_fork(tmp_path: Path) -> None:
    with WarmProcessExecutor(tmp_path, preload=["numpy"]) as executor:
        (result,) = executor.collect([start(executor, "modules")], timeout=PATIENCE)
    assert result["result"] == ["numpy"]


def test_a_slow_start_can_be_had(tmp_path: Path) -> None:
    with WarmProcessExecutor(tmp_path, preload=(), start_s=0.3) as executor:
        executor.warm_up()
        began = time.monotonic()
        executor.collect([start(executor, "speak")], timeout=PATIENCE)
        assert time.monotonic() - began >= 0.3


def test_a_zygote_that_cannot_import_is_a_launch_error(tmp_path: Path) -> None:
    with (
        WarmProcessExecutor(tmp_path, preload=["no_such_module"]) as executor,
        pytest.raises(LaunchError, match=r"has ended: ModuleNotFoundError: .*no_such_module"),
    ):
        start(executor, "sleep")
    assert "no_such_module" in (tmp_path / "zygote.log").read_text()


def test_replicas_die_with_the_executor(tmp_path: Path) -> None:
    with WarmProcessExecutor(tmp_path, preload=()) as executor:
        handle = start(executor, "sleep")
    wait_until(lambda: is_gone(pid(handle)))
    status = WarmProcessExecutor(tmp_path).poll(handle)
    assert (status, status.reason) == ("failed", "lost")


def test_replicas_die_with_a_killed_launcher(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from diloco_cloud.chaos.warm import WarmProcessExecutor\n"
        "executor = WarmProcessExecutor(sys.argv[1], preload=())\n"
        "handles = executor.launch_replicas(2, 'warm_programs:sleep', {})\n"
        "print(*(handle.metadata['pid'] for handle in handles), flush=True)\n"
        "time.sleep(120)\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with launcher:
        assert launcher.stdout is not None
        pids = [int(text) for text in launcher.stdout.readline().split()]
        launcher.kill()
    assert len(pids) == 2
    wait_until(lambda: all(map(is_gone, pids)))


def test_foreign_handles_are_not_taken_for_ours(warm: WarmProcessExecutor) -> None:
    foreign = ReplicaHandle(0, "local_process", {"pid": 1})
    assert warm.poll(foreign).reason == "lost"
    warm.cancel(foreign)
    assert warm.stream_logs(foreign) == ""
    handle = start(warm, "sleep")
    handle.metadata["host"] = "elsewhere"
    assert warm.poll(handle) == "unknown"
    warm.cancel(handle)
    assert not is_gone(pid(handle))
