"""A run on Hugging Face Jobs from launch to result; one replica dies on the way and comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster_runs import (
    CANARY,
    CANARY_NAME,
    DEADLINE_S,
    ROUNDS,
    RUN_ID,
    TINY,
    Terminal,
    check_result,
    in_a_round,
    launch_words,
    provider_name,
    stored,
    until,
)
from fakes.hf_gateway import fake_gateway
from fakes.hf_hub import FakeHub
from hf_jobs_fixtures import IMAGE, hub
from servers import S3Server

__all__ = ["hub"]


def test_run_is_carried_from_launch_to_result(
    hub: FakeHub,
    s3_env: S3Server,
    s3_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CANARY_NAME, CANARY)
    settings = {"image": IMAGE, "namespace": "our-team"}
    words = launch_words("hf-jobs", settings, s3_env, s3_uri, rounds=ROUNDS)
    words += ["--quorum", "3", "--gpu", "a10g-large"]  # no round without all three
    here, elsewhere = Terminal(tmp_path), Terminal(Path("/"))

    code, preview, err = here.call(*words, "--dry-run")
    assert code == 0, err
    assert hub.requests == []
    code, out, err = here.call(*words)
    assert (code, out) == (0, f"{RUN_ID}\n"), err
    where = (RUN_ID, "--store", s3_uri)
    follower = elsewhere.start("logs", "-f", *where)
    supervisor = elsewhere.start("supervise", *where)
    try:
        until(lambda: in_a_round(s3_uri, [0, 1, 2]), "a round of all three")
        hub.job_of(1).kill()
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
    check_result(s3_uri, {0: 0, 1: 1, 2: 0})
    assert sorted(job.spec["labels"]["name"] for job in hub.jobs) == [
        f"{provider_name(s3_uri)}-{life}" for life in ("0.0", "1.0", "1.1", "2.0")
    ]
    code, out_status, err = elsewhere.call("status", *where, "--json")
    assert code == 0, err
    assert "137" in json.loads(out_status)["replicas"][1]["restarted_after"]
    assert RUN_ID in elsewhere.call("ls", "--store", s3_uri)[1]
    _check_secrets(hub, preview, out + told, stored(s3_uri))
    assert elsewhere.call("down", *where, "--yes")[0] == 0


def test_cancel_ends_what_a_killed_launcher_had_started(hub: FakeHub, tmp_path: Path) -> None:
    """Killed while the reply to the third of four requests is on its way."""
    hub.queue()
    hub.fault("POST", "/api/jobs/tester$", "stall", skip=2)
    here, store = Terminal(tmp_path), str(tmp_path / "store")
    words = ["launch", "--backend", "hf-jobs", "--backend-arg", f"image={IMAGE}", "--yes", "-d"]
    launcher = here.start(*words, "--replicas", "4", "--run-id", RUN_ID, "--store", store)
    try:
        until(lambda: len(hub.jobs) == 3, "the third request")
    finally:
        launcher.kill()
        launcher.communicate()
    code, _, err = here.call("cancel", RUN_ID, "--store", store)
    assert code == 0, err
    assert [job.stage for job in hub.jobs] == ["CANCELED"] * 3
    assert here.call("wait", RUN_ID, "--store", store, "--timeout", "60")[0] == 103


def test_run_meets_in_a_storage_bucket_of_the_hub(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the hub: its jobs, and its buckets through their S3 gateway."""
    with fake_gateway() as gateway:
        for name, value in gateway.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
        store = gateway.uri("runs")
        words = ["launch", "--backend", "hf-jobs", "--backend-arg", f"image={IMAGE}", "--yes"]
        words += ["--replicas", "2", "--run-id", RUN_ID, "--store", store, "--rounds", "2"]
        words += ["--sync-every", "2", *(f"--set={name}={value}" for name, value in TINY.items())]
        words += ["--env", f"DILOCO_HF_S3_ENDPOINT={gateway.endpoint}"]
        words += ["--secret=AWS_ACCESS_KEY_ID", "--secret=AWS_SECRET_ACCESS_KEY", "--quiet"]
        code, out, err = Terminal(tmp_path).call(*words)
        assert (code, out) == (0, f"{RUN_ID}\n"), err
        check_result(store, {0: 0, 1: 0})
        assert gateway.redirects > 0
        assert gateway.refused == []


def _check_secrets(hub: FakeHub, preview: str, output: str, objects: bytes) -> None:
    """The canary is in the secrets of the jobs, and nowhere else."""
    logs = "".join(line for job in hub.jobs for _, line in job.log)
    for place in (preview, output, logs, objects.decode(errors="replace")):
        assert CANARY not in place
    assert {job.spec["secrets"][CANARY_NAME] for job in hub.jobs} == {CANARY}
    holding = [request for request in hub.requests if CANARY in request.path + request.body]
    assert {request.path for request in holding} == {"/api/jobs/our-team"}
    for request in holding:
        body = json.loads(request.body)
        del body["secrets"][CANARY_NAME]
        assert CANARY not in json.dumps(body)
