"""When a launch goes wrong, no error, log or file tells a secret: a case for every backend's SDK.

Providers quote what they do not like, SDKs keep the request in their errors, and what reports
crashes shows the local variables of every frame.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from fakes.aws_errors import AwsError
from fakes.aws_server import FakeAws
from fakes.hf_hub import FakeHub
from fakes.modal_cloud import FakeModal
from fakes.ray_dashboard import FakeDashboard
from fakes.slurm_cluster import FakeCluster
from grpclib import Status
from hf_jobs_fixtures import hub, make
from leaks import CANARY, leaks
from modal_fixtures import modal_cloud, modal_executor, modal_server
from ray_fixtures import dashboard
from sagemaker_fixtures import IMAGE, OUTPUT, aws, executor, make_executor
from slurm_fixtures import fake_slurm

from diloco_cloud.cli.main import cli
from diloco_cloud.errors import DilocoError
from diloco_cloud.executor import LaunchOptions, ServerlessExecutor
from diloco_cloud.executors.local import LocalProcessExecutor
from diloco_cloud.executors.ray import RayJobsExecutor
from diloco_cloud.executors.sagemaker import SageMakerExecutor, clients, secrets
from diloco_cloud.executors.slurm import SlurmExecutor, commands
from diloco_cloud.executors.slurm.commands import Output, run_here
from diloco_cloud.secrets import revealed
from diloco_cloud.testing.crash_reports import readable

__all__ = [
    "aws",
    "dashboard",
    "executor",
    "fake_slurm",
    "hub",
    "make",
    "make_executor",
    "modal_cloud",
    "modal_executor",
    "modal_server",
]

SLEEP = "diloco_cloud.testing.programs:sleep"
OPTIONS = LaunchOptions(name="run-1", secrets=["HF_TOKEN=CANARY_SOURCE"])
#: As a provider would quote it.
QUOTED = json.dumps({"HF_TOKEN": CANARY})


@pytest.fixture(autouse=True)
def _loud(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The canary is in the environment, and everybody writes down all they can."""
    monkeypatch.setenv("CANARY_SOURCE", CANARY)
    caplog.set_level(logging.DEBUG)
    yield
    assert leaks(caplog.text) == []


def _failure(executor: ServerlessExecutor, options: LaunchOptions = OPTIONS) -> DilocoError:
    """What a launch raises; nothing that can be read of it tells the canary."""
    with pytest.raises(DilocoError) as caught:
        executor.launch_replicas(1, SLEEP, {}, options=options)
    assert leaks(readable(caught.value)) == []
    return caught.value


def _texts_below(directory: Path) -> str:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return "\n".join(path.read_text(errors="replace") for path in files)


# -- SageMaker -------------------------------------------------------------------------------------


AWS_SAYS: dict[str, AwsError | str] = {
    "quotes": AwsError("ValidationException", f"Value '{QUOTED}' at 'secretString' is too long"),
    "quotes within": AwsError("InvalidRequestException", f"You sent {json.dumps(QUOTED)}"),
    "hangs up": "lose_reply",
}


@pytest.mark.parametrize("operation", ["CreateSecret", "PutSecretValue"])
@pytest.mark.parametrize("case", AWS_SAYS)
def test_sagemaker_tells_no_secret(
    aws: FakeAws,
    executor: SageMakerExecutor,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    operation: str,
) -> None:
    monkeypatch.setattr(clients, "_PATIENT_TRIES", 1)
    if operation == "PutSecretValue":
        aws.secrets.values["diloco-cloud/run-1"] = "{}"
    aws.faults.append((operation, AWS_SAYS[case]))
    error = _failure(executor)
    assert "keep the secrets" in error.message
    assert operation in aws.operations()
    assert "CreateTrainingJob" not in aws.operations()


def test_sagemaker_sdk_that_quotes_its_parameters_tells_no_secret(
    aws: FakeAws, executor: SageMakerExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """botocore's ParamValidationError holds the value; here it is given one of a wrong kind."""
    monkeypatch.setattr(secrets, "_text", revealed)
    error = _failure(executor)
    assert "Invalid type for parameter SecretString, value: {'HF_TOKEN': '***'}" in error.message


def test_sagemaker_tells_no_secret_on_the_command_line(
    aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with DILOCO_DEBUG=1, before the launch that failed, or after it."""
    monkeypatch.setattr(clients, "_PATIENT_TRIES", 1)
    monkeypatch.setenv("DILOCO_DEBUG", "1")
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.chdir(tmp_path)
    settings = {"role": aws.role, "image": IMAGE, "output_uri": OUTPUT}
    words = ["launch", "--backend", "sagemaker", "--run-id", "run-1", "--replicas", "2"]
    words += ["--store", str(tmp_path / "runs"), "--secret", "HF_TOKEN", "--yes"]
    words += [f"--backend-arg={name}={value}" for name, value in settings.items()]
    preview = CliRunner().invoke(cli, [*words, "--dry-run"])
    assert preview.exit_code == 0, preview.output
    assert "HF_TOKEN" in preview.output
    aws.faults.append(("CreateSecret", AWS_SAYS["quotes"]))
    failed = CliRunner().invoke(cli, [*words, "-d"])
    assert isinstance(failed.exception, DilocoError)
    assert "keep the secrets" in failed.exception.message
    texts = [preview.output, failed.output, readable(failed.exception), _texts_below(tmp_path)]
    assert [leaks(text) for text in texts] == [[]] * 4
    assert not texts[-1]  # What was written is deleted.


# -- Hugging Face Jobs -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["quotes", "hangs up", "is busy"])
def test_hub_tells_no_secret(
    hub: FakeHub,
    make: Callable[..., ServerlessExecutor],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    def quote(namespace: str, spec: dict[str, Any]) -> object:
        raise jsonschema.ValidationError(f"{json.dumps(spec['secrets'])} is not valid")

    if case == "quotes":
        monkeypatch.setattr(hub, "create", quote)
    else:
        kind = "drop" if case == "hangs up" else 503
        hub.fault("POST", r"/api/jobs/tester$", kind, times=99)
    error = _failure(make())
    if case == "quotes":
        assert '{"HF_TOKEN": "***"} is not valid' in error.message


def test_hub_s_client_that_prints_requests_gets_no_secret(
    hub: FakeHub, make: Callable[..., ServerlessExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at HF_DEBUG when it is imported, and never again."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_DEBUG", True)
    assert "HF_DEBUG" in _failure(make()).message


# -- Modal -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [Status.INVALID_ARGUMENT, Status.NOT_FOUND])
def test_modal_tells_no_secret(
    modal_cloud: FakeModal, modal_executor: Callable[..., ServerlessExecutor], status: Status
) -> None:
    modal_cloud.fail("SecretGetOrCreate", times=99, status=status, message=f"no: {QUOTED}")
    assert "***" in _failure(modal_executor()).message


def test_modal_that_fails_later_tells_no_secret(
    modal_cloud: FakeModal, modal_executor: Callable[..., ServerlessExecutor]
) -> None:
    invalid = Status.INVALID_ARGUMENT
    modal_cloud.fail("FunctionCreate", times=99, status=invalid, message=f"no: {QUOTED}")
    assert "***" in _failure(modal_executor()).message


# -- Slurm -----------------------------------------------------------------------------------------


def test_slurm_tells_no_secret(
    fake_slurm: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when nothing can be written, nor when it takes too long, nor when it is refused."""

    def stuck(argv: Sequence[str], stdin: str) -> Output:
        if argv[0] != "sh":
            return run_here(argv, stdin)
        with monkeypatch.context() as patched:
            patched.setattr(commands, "TIMEOUT_S", 0.1)
            return run_here(["sleep", "60"], stdin)

    (tmp_path / "file").touch()
    there = str(tmp_path / "shared")
    assert "written" in _failure(SlurmExecutor(directory=str(tmp_path / "file/x"))).message
    assert "nvalid partition" in _failure(SlurmExecutor(directory=there, partition="no")).message
    assert leaks(_texts_below(tmp_path)) == []
    assert "did not answer" in _failure(SlurmExecutor(directory=there, run=stuck)).message


# -- Ray -------------------------------------------------------------------------------------------


def test_ray_tells_no_secret(dashboard: FakeDashboard, tmp_path: Path) -> None:
    """Neither when its file cannot be written, nor when the job is refused."""

    def ray(secrets_dir: Path) -> RayJobsExecutor:
        return RayJobsExecutor(
            address=dashboard.address, python=sys.executable, secrets_dir=str(secrets_dir)
        )

    (tmp_path / "file").touch()
    assert "cannot be written" in _failure(ray(tmp_path / "file/x")).message
    dashboard.token = "another"
    assert "does not let us in" in _failure(ray(tmp_path / "shared")).message
    assert list((tmp_path / "shared").iterdir()) == []
    assert leaks(json.dumps(dashboard.requests)) == []


# -- this machine ----------------------------------------------------------------------------------


def test_local_tells_no_secret(
    local: LocalProcessExecutor, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY_SOURCE", CANARY + 200_000 * "x")  # more than a variable may hold
    assert "did not start" in _failure(local).message
    assert leaks(_texts_below(state_dir)) == []
