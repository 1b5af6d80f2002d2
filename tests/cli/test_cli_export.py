"""``diloco-cloud export``: what it prints, what it writes to the store, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import Result

from diloco_cloud.run import Run

Call = Callable[..., Result]
WORDS = ("export", "--image", "registry/image:1", "--run-id", "run-1", "--replicas", "3")


@pytest.fixture
def s3_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_uri: str) -> str:
    """A store that replicas on other machines could reach; the working directory is empty."""
    monkeypatch.chdir(tmp_path)
    return s3_uri


def test_export_writes_the_run_and_prints_what_starts_it(
    call: Call, s3_like: str, caplog: pytest.LogCaptureFixture
) -> None:
    result = call(*WORDS, "--to", "kubernetes", "--store", s3_like, "--secret", "HF_TOKEN")
    assert result.exit_code == 0, result.output
    job = yaml.safe_load(result.stdout)
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    run = Run.open(s3_like, "run-1")
    assert command[-1] == run.spec.digest
    assert f"{s3_like}/run-1" in command
    assert (run.spec.backend, run.spec.secrets) == ("kubernetes", ("HF_TOKEN",))
    assert "kubectl create secret generic run-1" in result.stderr

    assert call(*WORDS, "--to", "kubernetes", "--store", s3_like).exit_code == 2  # taken
    status = json.loads(call("status", "run-1", "--store", s3_like, "--json").stdout)
    assert (status["state"], len(status["replicas"])) == ("pending", 3)
    assert call("cancel", "run-1", "--store", s3_like).exit_code == 0
    assert "what kubernetes has started, it stops: kubectl delete job run-1" in caplog.text
    assert call("down", "run-1", "--store", s3_like, "--yes").exit_code == 0


def test_launch_on_an_orchestrator_says_how_it_is_done(call: Call) -> None:
    result = call("launch", "--backend", "kubernetes", "--store", "s3://b/r", "--dry-run")
    assert result.exit_code == 2
    assert "diloco-cloud export --to kubernetes" in result.output


def test_dry_run_needs_no_store(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    words = ("--to", "skypilot", "--store", "s3://bucket/runs", "--spot", "--dry-run")
    result = call(*WORDS, *words, "--gpu", "A100", "--max-restarts", "5")
    assert result.exit_code == 0, result.output
    task = yaml.safe_load(result.stdout)
    assert task["resources"]["accelerators"] == "A100"
    assert task["resources"]["use_spot"] is True
    assert task["resources"]["job_recovery"]["max_restarts_on_errors"] == 5


def test_file_of_another_backend_can_be_exported(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('store = "s3://bucket/runs"\nsync_every = 7\n[backend.local]\ngrace = 3\n')
    result = call(*WORDS, str(file), "--to", "kubernetes", "--dry-run")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "kubernetes"), "replicas on other machines cannot reach"),
        (("--to", "kubernetes", "--store", "/tmp/runs"), "cannot reach /tmp/runs"),
        (("--to", "nomad", "--store", "s3://b/r"), "'nomad' is not one of"),
        (("--to", "kubernetes", "--store", "s3://b/r", "--spot"), "kubernetes takes no --spot"),
        (("--to", "skypilot", "--store", "s3://b/r", "--namespace", "x"), "takes no --namespace"),
        (("--to", "kubernetes", "--store", "s3://b/r", "--gpu", "A100"), "number of GPUs"),
        (("--to", "skypilot", "--store", "s3://b/r", "--trainer", "no.such:fn"), "no module"),
    ],
)
def test_export_that_cannot_work_is_refused(
    call: Call,
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*WORDS, *words)
    assert result.exit_code == 2
    assert message in result.output
    assert list(tmp_path.iterdir()) == []
