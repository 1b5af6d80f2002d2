"""What the hub is asked for, without a hub; and what is refused before it is asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from huggingface_hub import JobInfo

from diloco_cloud.cli.main import cli
from diloco_cloud.errors import ConfigError, MissingDependencyError
from diloco_cloud.executor import LaunchOptions
from diloco_cloud.executor_registry import get_executor
from diloco_cloud.executors.hf_jobs import HFJobsExecutor
from diloco_cloud.executors.hf_jobs.stages import status_of

PROGRAMS = "diloco_cloud.testing.programs"
SECRET = "canary-77aa-in-the-mine"
RUN = LaunchOptions(name="run-1")


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers: whatever asks the hub fails."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_DEBUG", raising=False)


def _preview(options: LaunchOptions = RUN, **settings: Any) -> list[dict[str, Any]]:
    executor = HFJobsExecutor(**settings)
    calls = executor.preview_launch(2, f"{PROGRAMS}:tell", {"a": 1}, timeout=90, options=options)
    return [call["run_job"] for call in calls]


def test_one_job_per_replica_differs_in_rank_only() -> None:
    first, second = _preview(hardware="a10g-large", image="me/image", namespace="us")
    assert (first["name"], second["name"]) == ("run-1-0.0", "run-1-1.0")
    assert (first["env"]["REPLICA_RANK"], second["env"]["REPLICA_RANK"]) == ("0", "1")
    assert (first["labels"]["diloco-rank"], second["labels"]["diloco-rank"]) == ("0", "1")
    for job in (first, second):
        assert job["command"][:3] == ["python", "-m", "diloco_cloud.replica_command"]
        assert (job["image"], job["flavor"], job["timeout"]) == ("me/image", "a10g-large", 90)
        assert (job["attempts"], job["namespace"]) == (1, "us")
        assert (job["labels"]["diloco-run"], job["labels"]["diloco-attempt"]) == ("run-1", "0")


def test_default_image_is_given_this_package() -> None:
    job = _preview()[0]
    assert job["image"].startswith("python:3")
    assert job["command"][:2] == ["sh", "-c"]
    assert job["command"][3].startswith("diloco-cloud[diloco,s3]==")
    assert job["command"][4:7] == ["python", "-m", "diloco_cloud.replica_command"]
    own = _preview(image="me/image", install="./wheels/x.whl")[0]
    assert own["command"][3] == "./wheels/x.whl"


def test_gpu_of_the_launch_goes_before_the_setting() -> None:
    executor = HFJobsExecutor(hardware="t4-small")
    (call,) = executor.preview_launch(1, f"{PROGRAMS}:tell", {}, gpu="h200")
    assert call["run_job"]["flavor"] == "h200"


def test_secrets_are_named_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", SECRET)
    options = LaunchOptions(name="run-1", secrets=["MY_TOKEN"])
    job = _preview(options, image="me/image")[0]
    assert job["secrets"] == {"MY_TOKEN": "(sent as a secret)"}
    assert SECRET not in json.dumps(job)
    monkeypatch.setenv("HF_DEBUG", "1")
    with pytest.raises(ConfigError, match="HF_DEBUG"):
        _preview(options)


def test_dry_run_of_the_command_line_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "launch --backend hf-jobs --replicas 2 --store s3://bucket/runs --gpu a10g-large"
    words += " --backend-arg image=me/image --backend-arg namespace=our-team --dry-run"
    result = CliRunner().invoke(cli, words.split())
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["spec"]["backend_args"] == {
        "hf-jobs": {"image": "me/image", "namespace": "our-team"}
    }
    jobs = [call["run_job"] for call in values["provider_requests"]]
    assert [job["env"]["REPLICA_RANK"] for job in jobs] == ["0", "1"]
    assert jobs[0]["command"][1:3] == ["-m", "diloco_cloud.replica_entrypoint"]
    assert {"--rendezvous-uri", "--spec-hash"} <= set(jobs[0]["command"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attempts": 0}, "attempts is 0"),
        ({"grace": -1}, "grace is -1"),
        ({"hardware": 4}, "hardware is 4\n  It must be a text."),
        ({"namespace": ""}, "namespace is ''"),
        ({"labels": "team=ours"}, "labels are 'team=ours'"),
        ({"attempts": "two"}, "does not accept"),
        ({"labels": {"a b": "c"}}, "which the hub does not take"),
        ({"labels": {"a": "b/c"}}, "which the hub does not take"),
        ({"labels": {"diloco-run": "x"}}, "is taken"),
        ({"hardwear": "t4-small"}, "no setting 'hardwear'\n  Did you mean 'hardware'?"),
        ({"token": "x"}, "no setting 'token'"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        get_executor("hf-jobs", **settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (LaunchOptions(name="my/run"), "the run's name is 'my/run'"),
        (LaunchOptions(name="x" * 101), "at most 100"),
        (LaunchOptions(env={"X": "1"}), "does not take the variable 'X'"),
        (LaunchOptions(env={"_X": "1"}), "does not take the variable '_X'"),
    ],
)
def test_names_that_the_hub_does_not_take_are_refused(options: LaunchOptions, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _preview(options)
    assert message in str(caught.value)


def test_long_names_keep_their_end() -> None:
    job = _preview(LaunchOptions(name="x" * 100))[1]
    assert (len(job["name"]), job["name"][-4:]) == (100, "-1.0")


def test_missing_sdk_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError) as caught:
        get_executor("hf-jobs")
    assert caught.value.fix == "pip install 'diloco-cloud[hf]'"


def _job(stage: str, message: str | None, running_s: int | None = 5) -> JobInfo:
    return JobInfo(
        id="1",
        owner={"id": "1", "name": "me", "type": "user"},
        status={"stage": stage, "message": message},
        durations={"runningSecs": running_s},
    )


@pytest.mark.parametrize(
    ("stage", "message", "expected"),
    [
        ("SCHEDULING", None, ("pending", None, None)),
        ("RUNNING", None, ("running", None, None)),
        ("COMPLETED", None, ("succeeded", 0, None)),
        ("CANCELED", None, ("cancelled", None, "cancelled")),
        ("CANCELED", "NO_CREDITS", ("failed", None, "no_capacity")),
        ("CANCELED", "RESOURCE_GROUP_LIMIT", ("failed", None, "no_capacity")),
        ("ERROR", "Job failed with exit code: 3. Reason: Error", ("failed", 3, "exit_code")),
        (
            "ERROR",
            "Job failed with exit code: 137. Reason: OOMKilled",
            ("failed", 137, "out_of_memory"),
        ),
        ("ERROR", "Job timeout", ("failed", None, "timeout")),
        ("ERROR", "The node was evicted", ("failed", None, "preempted")),
        ("ERROR", "Insufficient capacity for h200x8", ("failed", None, "no_capacity")),
        ("ERROR", None, ("failed", None, "exit_code")),
        ("DELETED", None, ("failed", None, "lost")),
        ("BUILDING", "new in 2027", ("unknown", None, None)),
    ],
)
def test_every_stage_is_a_state(
    stage: str, message: str | None, expected: tuple[str, int | None, str | None]
) -> None:
    status = status_of(_job(stage, message))
    assert (status, status.exit_code, status.reason) == expected
    assert status != "failed" or status.message


def test_end_without_a_word_at_the_timeout_is_a_timeout() -> None:
    assert status_of(_job("ERROR", None, 60), timeout_s=60).reason == "timeout"
    assert status_of(_job("ERROR", None, 59), timeout_s=60).reason == "exit_code"
    assert status_of(_job("ERROR", "exit code: 1", 60), timeout_s=60).reason == "exit_code"
