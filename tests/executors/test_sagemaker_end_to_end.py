"""A run on SageMaker from launch to result; one replica is preempted on the way, another dies."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from cluster_runs import (
    CANARY,
    CANARY_NAME,
    DEADLINE_S,
    ROUNDS,
    RUN_ID,
    Terminal,
    check_result,
    in_a_round,
    launch_words,
    provider_name,
    stored,
    until,
)
from fakes.aws_server import FakeAws
from sagemaker_fixtures import IMAGE, OUTPUT, aws
from servers import S3Server

__all__ = ["aws"]


@pytest.fixture
def s3_env(aws: FakeAws, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The S3 server; replicas reach it by the credentials of their execution role."""
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    aws.role_credentials = {
        "AccessKeyId": s3_server.access_key,
        "SecretAccessKey": s3_server.secret_key,
    }
    return s3_server


def test_run_is_carried_from_launch_to_result(
    aws: FakeAws,
    s3_env: S3Server,
    s3_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CANARY_NAME, CANARY)
    settings = {"role": aws.role, "image": IMAGE, "output_uri": OUTPUT, "spot": True}
    words = launch_words("sagemaker", settings, s3_env, s3_uri, rounds=ROUNDS)
    words = [word for word in words if not word.startswith("--secret=AWS_")]
    words += ["--quorum", "3", "--gpu", "A10G"]  # no round without all three
    here, elsewhere = Terminal(tmp_path), Terminal(Path("/"))

    code, preview, err = here.call(*words, "--dry-run")
    assert code == 0, err
    assert aws.requests == []
    code, out, err = here.call(*words)
    assert (code, out) == (0, f"{RUN_ID}\n"), err
    where = (RUN_ID, "--store", s3_uri)
    follower = elsewhere.start("logs", "-f", *where)
    supervisor = elsewhere.start("supervise", *where)
    try:
        until(lambda: in_a_round(s3_uri, [0, 1, 2]), "a round of all three")
        jobs, name = aws.training.jobs, provider_name(s3_uri)
        pid = jobs[f"{name}-r1-a0"].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)  # the supervisor starts it again, under a new name
        jobs[f"{name}-r2-a0"].preempt()  # SageMaker starts it again itself
        out, err = follower.communicate(timeout=DEADLINE_S)
        told, _ = supervisor.communicate(timeout=60)
    finally:
        follower.kill()
        supervisor.kill()
    assert follower.returncode == 0, err
    assert elsewhere.call("wait", *where)[:2] == (0, "SUCCEEDED\n")
    assert supervisor.returncode == 0, told
    for rank in range(3):
        assert f"replica/{rank} finished" in out
    check_result(s3_uri, {0: 0, 1: 1, 2: 1})
    assert sorted(jobs) == [f"{name}-r{r}" for r in ("0-a0", "1-a0", "1-a1", "2-a0")]
    assert jobs[f"{name}-r2-a0"].containers == 2
    replicas = json.loads(elsewhere.call("status", *where, "--json")[1])["replicas"]
    assert "137" in replicas[1]["restarted_after"]
    assert RUN_ID in elsewhere.call("ls", "--store", s3_uri)[1]
    _check_secrets(aws, preview, out, stored(s3_uri))
    assert aws.secrets.values.keys() <= {f"diloco-cloud/{name}"}  # or released at the run's end
    assert elsewhere.call("down", *where, "--yes")[0] == 0
    assert aws.secrets.values == {}


def _check_secrets(aws: FakeAws, preview: str, out: str, objects: bytes) -> None:
    """The canary is in no request but the secret channel's, and nowhere else."""
    allowed = {"CreateSecret", "PutSecretValue"}
    seen = {request.operation for request in aws.requests if CANARY in request.body}
    assert seen == allowed
    lines = "\n".join(event["message"] for stream in aws.logs.streams() for event in stream.events)
    assert "finished" in lines
    for text in (preview, out, lines):
        assert CANARY not in text
    assert CANARY.encode() not in objects
