"""Launching on SageMaker: lost answers, refusals, roll-back, and launchers that die."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import RUN_ID, Terminal, until
from fakes.aws_errors import AwsError
from fakes.aws_server import STRANGERS_KEY, FakeAws
from sagemaker_fixtures import IMAGE, OUTPUT, MakeExecutor, aws, executor, make_executor

from diloco_cloud.errors import ConfigError, DilocoError, LaunchError
from diloco_cloud.executor import LaunchOptions, ReplicaHandle
from diloco_cloud.executors.sagemaker import SageMakerExecutor, clients, secrets
from diloco_cloud.secrets import Secret

__all__ = ["aws", "executor", "make_executor"]

SLEEP = "diloco_cloud.testing.programs:sleep"
CREATE = "CreateTrainingJob"
CANARY = "canary-0d1f-in-the-mine"


@pytest.fixture(autouse=True)
def _one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience is for real networks."""
    monkeypatch.setattr(clients, "_PATIENT_TRIES", 3)


def _launch(
    executor: SageMakerExecutor, n_replicas: int = 2, **options: Any
) -> list[ReplicaHandle]:
    given = LaunchOptions(**{"name": "tale", **options})
    return executor.launch_replicas(n_replicas, SLEEP, {}, timeout=600, options=given)


def _going(aws: FakeAws) -> list[str]:
    return sorted(name for name, job in aws.training.jobs.items() if job.status == "InProgress")


def test_lost_answer_starts_nothing_twice(aws: FakeAws, executor: SageMakerExecutor) -> None:
    aws.faults += [(CREATE, "lose_reply"), (CREATE, "throttle")]
    handles = _launch(executor)
    assert [handle.metadata["name"] for handle in handles] == ["tale-r0-a0", "tale-r1-a0"]
    assert _going(aws) == ["tale-r0-a0", "tale-r1-a0"]


def test_launch_is_idempotent_by_name(aws: FakeAws, make_executor: MakeExecutor) -> None:
    assert _launch(make_executor()) == _launch(make_executor())
    assert len(aws.training.jobs) == 2


def test_name_of_another_job_is_not_taken_over(aws: FakeAws, executor: SageMakerExecutor) -> None:
    (first,) = _launch(executor, 1, env={"A": "1"})
    (second,) = _launch(executor, 1, env={"A": "2"})
    assert second.metadata["name"].startswith("tale-r0-a0-")
    assert first.metadata["name"] != second.metadata["name"]
    assert executor.recover("tale") == [first, second]


def test_launch_without_a_name_gets_one_of_its_own(executor: SageMakerExecutor) -> None:
    first, second = (executor.launch_replicas(1, SLEEP, {})[0] for _ in range(2))
    assert first.metadata["name"] != second.metadata["name"]


def test_quota_that_is_reached_rolls_back(aws: FakeAws, executor: SageMakerExecutor) -> None:
    aws.training.quota = 2
    with pytest.raises(LaunchError, match="for training job usage") as caught:
        _launch(executor, 4)
    assert "Service Quotas" in str(caught.value.fix)
    assert _going(aws) == []
    assert len(aws.training.jobs) == 2


def test_creation_that_may_have_been_heard_is_rolled_back(
    aws: FakeAws, executor: SageMakerExecutor
) -> None:
    aws.faults += [(CREATE, "lose_reply"), (CREATE, "unavailable"), (CREATE, "unavailable")]
    with pytest.raises(LaunchError, match="could not start replica 0"):
        _launch(executor, 1)
    assert list(aws.training.jobs) == ["tale-r0-a0"]
    assert _going(aws) == []


def test_secrets_of_a_launch_that_failed_are_deleted(
    aws: FakeAws, executor: SageMakerExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    aws.training.quota = 0
    with pytest.raises(LaunchError):
        _launch(executor, 1, secrets=["HF_TOKEN"])
    assert "CreateSecret" in aws.operations()
    assert aws.secrets.values == {}


def test_secrets_whose_launcher_died_before_its_first_job_are_released(
    aws: FakeAws, make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has a handle to forget; what a launch of a moment ago needs is left alone."""
    executor = make_executor()
    secrets.keep(
        executor._clients.get("secretsmanager", "us-east-1"), "tale", {"A": Secret("A", CANARY)}
    )
    executor.release("tale")
    assert list(aws.secrets.values) == ["diloco-cloud/tale"]
    aws.secrets.changed_at["diloco-cloud/tale"] -= 600
    executor.release("tal")
    assert list(aws.secrets.values) == ["diloco-cloud/tale"]
    executor.release("tale")
    assert aws.secrets.values == {}
    executor.release("tale")
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    make_executor().release("tale")  # never raises


def test_secrets_stay_while_a_job_goes_on(
    aws: FakeAws, executor: SageMakerExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    aws.training.full.set()
    (handle,) = _launch(executor, 1, secrets=["HF_TOKEN"])
    aws.secrets.changed_at["diloco-cloud/tale"] -= 600
    executor.release("tale")
    assert list(aws.secrets.values) == ["diloco-cloud/tale"]
    executor.cancel(handle)
    until(lambda: executor.poll(handle).is_terminal, "the end of the job")
    executor.release("tale")
    assert aws.secrets.values == {}


def test_secret_whose_namesake_is_being_deleted_is_kept_when_that_is_gone(aws: FakeAws) -> None:
    client = clients.Clients().get("secretsmanager", "us-east-1")
    aws.secrets.deleting = 2
    pauses: list[float] = []
    assert secrets.keep(client, "tale", {"A": Secret("A", CANARY)}, pauses.append)
    assert pauses == [1.0, 2.0]
    assert CANARY in aws.secrets.values["diloco-cloud/tale"]


def test_recovery_looks_where_the_others_of_the_run_are(
    aws: FakeAws,
    make_executor: MakeExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, _ = _launch(make_executor())
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    asked: list[str] = []
    elsewhere = make_executor()
    monkeypatch.setattr(elsewhere._board, "arns", lambda name, region: asked.append(region) or {})
    assert elsewhere.recover("tale") == []
    assert "in eu-west-1, the region that is set here, of account " in caplog.text
    assert "set AWS_REGION to that region, AWS_PROFILE" in caplog.text
    caplog.clear()
    elsewhere.poll(first)  # as whoever cancels a run does first
    assert elsewhere.recover("tale") == []
    assert asked == ["eu-west-1", "us-east-1"]
    assert caplog.text == ""


def test_secrets_are_in_no_log_however_loud(
    aws: FakeAws,
    executor: SageMakerExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    caplog.set_level(logging.DEBUG)
    (handle,) = _launch(executor, 1, secrets=["HF_TOKEN"])
    assert json.loads(aws.secrets.values["diloco-cloud/tale"]) == {"HF_TOKEN": CANARY}
    monkeypatch.setenv("HF_TOKEN", f"{CANARY}-renewed")
    _launch(executor, 1, secrets=["HF_TOKEN"], attempt=1)
    assert CANARY + "-renewed" in aws.secrets.values["diloco-cloud/tale"]
    assert "CreateTrainingJob" in caplog.text
    assert CANARY not in caplog.text
    assert CANARY not in repr(handle)
    executor.forget(handle)
    assert aws.secrets.values == {}


REFUSALS: dict[str, tuple[AwsError | str, type[DilocoError], str]] = {
    "may not": (
        AwsError("AccessDeniedException", "not authorized to perform: sagemaker:CreateTrainingJob"),
        ConfigError,
        "docs/backends/sagemaker.md",
    ),
    "may not pass": (
        AwsError("AccessDeniedException", "User is not authorized to perform: iam:PassRole"),
        ConfigError,
        "iam:PassRole",
    ),
    "wrong role": (
        AwsError("ValidationException", "Could not assume role arn:aws:iam::1:role/x."),
        ConfigError,
        "sagemaker.amazonaws.com",
    ),
    "expired": ("expired", LaunchError, "aws sso login"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_says_what_to_do(aws: FakeAws, executor: SageMakerExecutor, case: str) -> None:
    fault, kind, fix = REFUSALS[case]
    aws.faults += [(CREATE, fault)] * 3  # type: ignore[list-item]
    with pytest.raises(kind) as caught:
        _launch(executor, 1)
    assert fix in str(caught.value.fix)
    assert aws.training.jobs == {}


def test_check_finds_what_is_wrong_with_credentials_and_role(
    aws: FakeAws, make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(match: str, **settings: Any) -> None:
        with pytest.raises(ConfigError, match=match) as caught:
            make_executor(**settings).check_launch(1, SLEEP, {})
        assert caught.value.fix

    make_executor().check_launch(1, SLEEP, {})
    check("no role other", role=aws.identity.arn("other"))
    aws.identity.roles["distrustful"] = {"Statement": [{"Effect": "Allow", "Principal": "x"}]}
    check("does not let", role=aws.identity.arn("distrustful"))
    aws.identity.may_read_roles = False
    make_executor(role=aws.identity.arn("other")).check_launch(1, SLEEP, {})  # AWS will tell
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", STRANGERS_KEY)
    check("in account 123456789012, and the credentials here are of 999999999999")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobodys-key")
    check("invalid")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    check("no AWS credentials")
    assert CREATE not in aws.operations()


def test_launcher_that_dies_leaves_nothing_that_cancel_does_not_find(
    aws: FakeAws, tmp_path: Path
) -> None:
    """It dies between the creation of the third job of four and its answer."""
    here, elsewhere = Terminal(tmp_path), Terminal(Path("/"))
    store = str(tmp_path / "runs")
    settings = {"role": aws.role, "image": IMAGE, "output_uri": OUTPUT}
    words = ["launch", "--backend", "sagemaker", "--replicas", "4", "--run-id", RUN_ID, "--yes"]
    words += [f"--backend-arg={name}={value}" for name, value in settings.items()]
    aws.faults += [(CREATE, AwsError("ThrottlingException", "Rate exceeded"))]
    aws.training.full.set()  # no replica gets to run
    launcher = here.start(*words, "--store", store)
    try:
        until(lambda: len(aws.training.jobs) == 2, "the second job")
        aws.faults.append((CREATE, "hang"))
        until(aws.hanging.is_set, "the third job")
    finally:
        launcher.kill()
        launcher.communicate()
    started = list(aws.training.jobs)
    recorded = sorted(Path(store, RUN_ID, "replicas").glob("*/0000.json"))
    assert len(recorded) < len(started)
    code, _, err = elsewhere.call("cancel", RUN_ID, "--store", store)
    assert code == 0, err
    until(lambda: _going(aws) == [], "the end of all jobs")
    assert {job.secondary for job in aws.training.jobs.values()} <= {"Stopping", "Stopped"}


def test_help_imports_no_sdk() -> None:
    """Neither does asking which backends there are; boto3 takes half a second."""
    code = (
        "import sys; from diloco_cloud.executors.sagemaker import SageMakerExecutor; "
        "SageMakerExecutor(); print([m for m in ('boto3', 'botocore', 'sagemaker') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
