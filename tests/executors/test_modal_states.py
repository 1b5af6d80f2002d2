"""Every state of a call of Modal's, as a replica's state; containers are real processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.modal_cloud import FakeModal
from grpclib import Status
from modal_fixtures import modal_cloud, modal_executor, modal_server
from modal_proto import api_pb2

from diloco_cloud.executor import LaunchOptions, ReplicaHandle, ReplicaStatus
from diloco_cloud.executors.modal import ModalExecutor

__all__ = ["modal_cloud", "modal_executor", "modal_server"]

MakeExecutor = Callable[..., ModalExecutor]
PROGRAMS = "diloco_cloud.testing.programs"
Result = api_pb2.GenericResult


@pytest.fixture
def executor(modal_executor: MakeExecutor) -> ModalExecutor:
    return modal_executor()


def _one(
    executor: ModalExecutor, function: str, *, timeout: float = 600, **arguments: Any
) -> ReplicaHandle:
    (handle,) = executor.launch_replicas(1, function, arguments, timeout=timeout)
    return handle


def _told(status: ReplicaStatus) -> tuple[str, str | None, int | None]:
    return str(status), status.reason, status.exit_code


def test_call_without_a_machine_is_pending_until_there_is_one(
    modal_cloud: FakeModal, executor: ModalExecutor
) -> None:
    modal_cloud.hold(new_calls=True)
    handle = _one(executor, f"{PROGRAMS}:sleep")
    assert executor.poll(handle) == "pending"
    modal_cloud.release()
    modal_cloud.until(lambda: executor.poll(handle) == "running")
    executor.cancel(handle)
    modal_cloud.until(lambda: executor.poll(handle) == "cancelled")


def test_cancelled_before_it_began_costs_no_container(
    modal_cloud: FakeModal, executor: ModalExecutor
) -> None:
    modal_cloud.hold(new_calls=True)
    handle = _one(executor, f"{PROGRAMS}:sleep")
    executor.cancel(handle)
    assert _told(executor.poll(handle)) == ("cancelled", "cancelled", None)
    assert modal_cloud.workers.containers == {}


ENDS: dict[str, tuple[int, str, str, str]] = {
    "time": (Result.GENERIC_STATUS_TIMEOUT, "hit its timeout", "failed", "timeout"),
    "machine": (Result.GENERIC_STATUS_INTERNAL_FAILURE, "worker lost", "failed", "preempted"),
    "memory": (
        Result.GENERIC_STATUS_FAILURE,
        "Container was terminated: out of memory",
        "failed",
        "out_of_memory",
    ),
    "start": (Result.GENERIC_STATUS_INIT_FAILURE, "no such module", "failed", "exit_code"),
    "somebody": (Result.GENERIC_STATUS_TERMINATED, "", "cancelled", "cancelled"),
    "unheard of": (Result.GENERIC_STATUS_IDLE_TIMEOUT, "idle", "unknown", None),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", ENDS)
def test_end_that_modal_tells_has_a_reason(
    modal_cloud: FakeModal, executor: ModalExecutor, case: str
) -> None:
    status, exception, state, reason = ENDS[case]
    modal_cloud.hold(new_calls=True)
    handle = _one(executor, f"{PROGRAMS}:sleep")
    modal_cloud.end(modal_cloud.calls()[0], status, exception)
    found = executor.poll(handle)
    assert (str(found), found.reason) == (state, reason)
    assert exception in found.message


def test_result_that_modal_no_longer_has_is_lost(
    modal_cloud: FakeModal, executor: ModalExecutor
) -> None:
    modal_cloud.hold(new_calls=True)
    handle = _one(executor, f"{PROGRAMS}:sleep")
    modal_cloud.forget_results()
    assert _told(executor.poll(handle)) == ("failed", "lost", None)


@pytest.mark.parametrize(
    "trouble",
    [
        Status.UNAVAILABLE,
        Status.RESOURCE_EXHAUSTED,
        Status.INTERNAL,
        Status.DEADLINE_EXCEEDED,
        Status.UNAUTHENTICATED,
        Status.PERMISSION_DENIED,
    ],
)
def test_question_that_is_not_answered_fails_nobody(
    modal_cloud: FakeModal, executor: ModalExecutor, trouble: Status
) -> None:
    modal_cloud.hold(new_calls=True)
    handle = _one(executor, f"{PROGRAMS}:sleep")
    modal_cloud.fail("*", times=99, status=trouble, message="no answer today")
    status = executor.poll(handle)
    assert _told(status) == ("unknown", None, None)
    assert "no answer today" in status.message
    assert executor.stream_logs(handle) == ""
    modal_cloud.servicer.faults.clear()
    assert executor.poll(handle) == "pending"


def test_container_that_cannot_start_is_given_up(
    modal_cloud: FakeModal, executor: ModalExecutor
) -> None:
    modal_cloud.hold(new_calls=True)
    handle = _one(executor, f"{PROGRAMS}:sleep")
    (call,) = modal_cloud.calls()
    call.function.definition.module_name = "nothing_of_the_kind"
    modal_cloud.release()
    status = modal_cloud.until(lambda: (s := executor.poll(handle)).is_terminal and s)
    assert _told(status) == ("failed", "exit_code", None)
    assert "nothing_of_the_kind" in status.message
    assert call.starts == 3


def test_preempted_replica_hears_of_it_and_goes_on_elsewhere(
    modal_cloud: FakeModal, executor: ModalExecutor
) -> None:
    handle = _one(executor, f"{PROGRAMS}:identify", names=["REPLICA_RANK"], seconds=600)
    (call,) = modal_cloud.calls()
    modal_cloud.until(lambda: "contract-suite" in modal_cloud.log(call))
    modal_cloud.preempt(call)
    modal_cloud.until(lambda: call.starts == 2)
    modal_cloud.until(lambda: modal_cloud.log(call).count("contract-suite") == 2)
    assert executor.poll(handle) == "running"
    executor.cancel(handle)
    modal_cloud.until(lambda: executor.poll(handle) == "cancelled")


def test_time_slices_follow_each_other_until_all_are_used_up(
    modal_cloud: FakeModal, executor: ModalExecutor
) -> None:
    handle = _one(executor, f"{PROGRAMS}:sleep", timeout=100_000)
    (call,) = modal_cloud.calls()
    modal_cloud.until(lambda: "asleep" in modal_cloud.log(call))
    modal_cloud.expire(call)
    modal_cloud.until(lambda: modal_cloud.log(call).count("asleep") == 2)
    assert executor.poll(handle) == "running"
    modal_cloud.expire(call)
    assert _told(executor.poll(handle)) == ("failed", "timeout", None)


def test_cancelled_replica_is_given_time_to_hand_over(
    modal_cloud: FakeModal,
    modal_executor: MakeExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    executor = modal_executor(modules="replica_programs")
    ready = tmp_path / "ready"
    handle = _one(executor, "replica_programs:ask_child_on_sigterm", ready=str(ready))
    modal_cloud.until(ready.exists)
    executor.cancel(handle)
    modal_cloud.until(lambda: executor.poll(handle) == "cancelled")
    assert Path(f"{ready}.answer").read_text() == "finished"


def test_code_is_the_launchers_own(
    modal_cloud: FakeModal,
    modal_executor: MakeExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = "def where(): import diloco_cloud; return [__file__, diloco_cloud.__file__]"
    (tmp_path / "my_module.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    executor = modal_executor(modules=["my_module"])
    (result,) = executor.collect([_one(executor, "my_module:where")], timeout=120)
    root = str(modal_cloud.workers.directory)
    assert all(path.startswith(root) for path in result["result"])


def test_log_is_followed_to_its_end_across_an_outage(
    modal_cloud: FakeModal, executor: ModalExecutor
) -> None:
    handle = _one(executor, f"{PROGRAMS}:count", lines=3, seconds=6)
    lines = executor.follow_logs(handle, interval=0.2)
    seen = [next(lines)]
    with modal_cloud.outage():
        assert executor.poll(handle) == "unknown"
    seen += lines
    text = "".join(seen)
    assert [text.count(part) for part in ("line 0\n", "line 1\n", "line 2\n")] == [1, 1, 1]
    assert text.endswith("to stderr\n")
    later = executor.follow_logs(handle, since=time.time() + 60)
    assert list(later) == []


def test_signal_is_told_as_a_negative_exit_code(executor: ModalExecutor) -> None:
    handle = _one(executor, f"{PROGRAMS}:kill_self", signum=int(signal.SIGKILL))
    (result,) = executor.collect([handle], timeout=120)
    assert _told(result["status"]) == ("failed", "exit_code", -9)
    assert "perhaps out of memory" in result["error"]


def test_options_are_used_by_recovery(
    modal_cloud: FakeModal, executor: ModalExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    options = LaunchOptions(name="run-9", ranks=[4], world_size=5, attempt=2)
    (handle,) = executor.launch_replicas(1, f"{PROGRAMS}:sleep", {}, options=options)
    (found,) = executor.recover("run-9")
    assert (found, caplog.text) == (handle, "")
    assert executor.recover("run-8") == []
    assert "knows no call of diloco-run-8 in the default environment" in caplog.text
    assert "set MODAL_PROFILE" in caplog.text
    executor.cancel(found)
    modal_cloud.until(lambda: executor.poll(handle) == "cancelled")
