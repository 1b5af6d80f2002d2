"""Jobs on their way: interruptions, capacity, warm pools, bills, logs, accounts, outages."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import until
from fakes.aws_errors import AwsError
from fakes.aws_server import STRANGERS_KEY, FakeAws
from sagemaker_fixtures import MakeExecutor, aws, executor, make_executor
from servers import S3Server

from diloco_cloud.executor import LaunchOptions, ReplicaHandle, ReplicaStatus
from diloco_cloud.executors.sagemaker import SageMakerExecutor

__all__ = ["aws", "executor", "make_executor"]

PROGRAMS = "diloco_cloud.testing.programs"


def _launch(
    executor: SageMakerExecutor, function: str = "sleep", n_replicas: int = 1, **arguments: Any
) -> list[ReplicaHandle]:
    options = LaunchOptions(name=arguments.pop("name", "tale"))
    entrypoint = f"{PROGRAMS}:{function}"
    return executor.launch_replicas(n_replicas, entrypoint, arguments, options=options)


def _reaches(
    executor: SageMakerExecutor, handle: ReplicaHandle, state: str, reason: str | None = None
) -> ReplicaStatus:
    seen: list[ReplicaStatus] = []

    def look() -> bool:
        seen[:] = [executor.poll(handle)]
        return seen[0] == state and seen[0].reason == reason

    until(look, f"{state} ({reason})")
    return seen[0]


def test_spot_job_that_is_interrupted_waits_and_goes_on(
    aws: FakeAws, make_executor: MakeExecutor
) -> None:
    executor = make_executor(spot=True)
    (handle,) = _launch(executor)
    _reaches(executor, handle, "running")
    until(lambda: executor.stream_logs(handle).count("asleep") == 1, "the log of the first life")
    aws.training.full.set()
    job = aws.training.jobs["tale-r0-a0"]
    job.preempt()
    waiting = _reaches(executor, handle, "pending", "preempted")
    assert "spot" in waiting.message
    aws.training.full.clear()
    _reaches(executor, handle, "running")
    assert job.containers == 2
    until(lambda: executor.stream_logs(handle).count("asleep") == 2, "the log of both lives")


def test_spot_job_that_finds_no_capacity_is_told_so(
    aws: FakeAws, make_executor: MakeExecutor
) -> None:
    executor = make_executor(spot=True, spot_wait=0)
    aws.training.full.set()
    options = LaunchOptions(name="tale")
    (handle,) = executor.launch_replicas(1, f"{PROGRAMS}:sleep", {}, timeout=1, options=options)
    status = _reaches(executor, handle, "failed", "no_capacity")
    assert "spot capacity" in status.message


def test_failures_of_the_provider_are_told_apart(aws: FakeAws, make_executor: MakeExecutor) -> None:
    executor = make_executor()
    aws.training.failures.append(
        "CapacityError: Unable to provision requested ML compute capacity."
    )
    (nowhere,) = _launch(executor, name="nowhere")
    assert "CapacityError" in _reaches(executor, nowhere, "failed", "no_capacity").message
    (lost,) = _launch(executor, name="lost")
    _reaches(executor, lost, "running")
    aws.training.jobs["lost-r0-a0"].lose()
    assert "InternalServerError" in _reaches(executor, lost, "failed", "lost").message
    (killed,) = _launch(executor, "kill_self", name="killed", signum=int(signal.SIGKILL))
    assert _reaches(executor, killed, "failed", "out_of_memory").exit_code == 137


def test_job_that_sagemaker_retries_is_not_lost(aws: FakeAws, make_executor: MakeExecutor) -> None:
    executor = make_executor(retries=1)
    (handle,) = _launch(executor)
    _reaches(executor, handle, "running")
    aws.training.jobs["tale-r0-a0"].lose()
    until(lambda: aws.training.jobs["tale-r0-a0"].containers == 2, "another container")
    _reaches(executor, handle, "running")


def test_bill_is_told_and_a_warm_instance_is_used_again_and_let_go(
    aws: FakeAws, make_executor: MakeExecutor
) -> None:
    executor = make_executor(keep_alive=600)
    (first,) = _launch(executor, "tell")
    assert executor.collect([first], timeout=120)[0]["status"] == "succeeded"
    usage = executor.usage(first)
    assert usage is not None
    assert usage.instance_type == "ml.g5.xlarge"
    assert usage.billable_s is not None
    assert usage.billable_s >= 1
    (second,) = _launch(executor, "tell", name="tale-2")
    executor.collect([second], timeout=120)
    jobs = aws.training.jobs
    assert jobs["tale-r0-a0"].warm_pool == {
        "Status": "Reused",
        "ResourceRetainedBillableTimeInSeconds": 0,
        "ReusedByJob": "tale-2-r0-a0",
    }
    executor.forget(first)
    executor.forget(second)
    assert jobs["tale-2-r0-a0"].warm_pool is not None
    assert jobs["tale-2-r0-a0"].warm_pool["Status"] == "Terminated"
    nobody = ReplicaHandle(0, "sagemaker", {})
    assert executor.usage(nobody) is None
    executor.forget(nobody)


def test_status_of_a_whole_run_costs_one_request(aws: FakeAws, make_executor: MakeExecutor) -> None:
    executor = make_executor(clock=lambda: 0.0)
    handles = _launch(executor, n_replicas=5)
    until(lambda: all(j.secondary == "Training" for j in aws.training.jobs.values()), "all run")
    before = len(aws.requests)
    assert [executor.poll(handle) for handle in handles] == ["running"] * 5
    assert aws.operations()[before:] == ["ListTrainingJobs"]


def test_who_may_not_list_may_still_describe(aws: FakeAws, executor: SageMakerExecutor) -> None:
    (handle,) = _launch(executor)
    denied = AwsError("AccessDeniedException", "not authorized: sagemaker:ListTrainingJobs")
    aws.faults += [("ListTrainingJobs", denied)]
    assert executor.poll(handle) in ("pending", "running")


def test_weather_is_no_failure(aws: FakeAws, executor: SageMakerExecutor) -> None:
    (handle,) = _launch(executor)
    for fault in ("throttle", "unavailable", "expired"):
        aws.faults += [("ListTrainingJobs", fault)] * 2  # type: ignore[list-item]
        until(lambda: executor.poll(handle) == "unknown", f"unknown: {fault}")
        aws.faults.clear()
        _reaches(executor, handle, "running")


def test_job_of_another_account_is_not_lost(
    aws: FakeAws, make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    (handle,) = _launch(make_executor())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", STRANGERS_KEY)
    status = make_executor().poll(handle)
    assert (status, status.reason) == ("unknown", None)
    assert "account 123456789012" in status.message


def test_followed_log_is_whole_in_spite_of_an_outage(
    aws: FakeAws, make_executor: MakeExecutor
) -> None:
    executor = make_executor(sleep=lambda _: time.sleep(0.02))
    (handle,) = _launch(executor, "count", lines=120, seconds=1.0)
    lines: list[str] = []
    reader = threading.Thread(
        target=lambda: lines.extend(executor.follow_logs(handle, interval=0.02)), daemon=True
    )
    reader.start()
    until(lambda: executor.poll(handle) == "running", "a running replica")
    with aws.outage():
        time.sleep(0.2)
    reader.join(timeout=120)
    assert not reader.is_alive()
    assert lines == [*(f"line {n}" for n in range(120)), "to stderr"]
    assert list(executor.follow_logs(handle, since=time.time() + 60, interval=0.02)) == []


def test_uploaded_sources_are_imported_by_the_replica(
    aws: FakeAws,
    s3_server: S3Server,
    make_executor: MakeExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "my_own").mkdir()
    (tmp_path / "my_own" / "__init__.py").write_text("")
    (tmp_path / "my_own" / "hello.py").write_text("def main(name):\n    print('hello', name)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    output = f"s3://{s3_server.bucket}/sources-{os.getpid()}"
    executor = make_executor(source_dir=str(tmp_path), output_uri=output)
    options = LaunchOptions(name="tale")
    (handle,) = executor.launch_replicas(1, "my_own.hello", {"name": "you"}, options=options)
    (result,) = executor.collect([handle], timeout=120)
    assert result["status"] == "succeeded", executor.stream_logs(handle)
    assert executor.stream_logs(handle) == "hello you\n"
