"""One run on two clouds: two replicas on Modal and two on Hugging Face Jobs meet in one bucket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import (
    CANARY,
    CANARY_NAME,
    RUN_ID,
    TINY,
    Terminal,
    check_result,
    in_a_round,
    provider_name,
    stored,
    until,
)
from fakes.hf_hub import FakeHub
from fakes.modal_cloud import FakeModal
from hf_jobs_fixtures import IMAGE, hub
from modal_fixtures import modal_cloud, modal_server
from modal_proto import api_pb2
from servers import OTHER_IDENTITIES, S3Server

from diloco_cloud.store import open_store

__all__ = ["hub", "modal_cloud", "modal_server"]

#: By backend: the launcher's variables that hold the store's credentials there.
KEYS = {"modal": ("MODAL_S3_KEY", "MODAL_S3_SECRET"), "hf-jobs": ("HF_S3_KEY", "HF_S3_SECRET")}


@pytest.fixture
def words(
    s3_env: S3Server, s3_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """``launch`` of the fleet from a file: each side with credentials of its own for the store."""
    monkeypatch.setenv(CANARY_NAME, CANARY)
    for names, keys in zip(KEYS.values(), OTHER_IDENTITIES.values(), strict=True):
        for name, value in zip(names, keys, strict=True):
            monkeypatch.setenv(name, value)
    port = s3_env.endpoint.rpartition(":")[2]
    file = tmp_path / "run.toml"
    file.write_text(
        f"""
        run_id = "{RUN_ID}"
        store = "{s3_uri}"
        rounds = 16
        sync_every = 2
        quorum = 4
        heartbeat = 1
        secrets = ["{CANARY_NAME}"]
        env = {{ AWS_REGION = "us-east-1", AWS_EC2_METADATA_DISABLED = "true" }}

        [backend.modal]
        replicas = 2
        gpu = "H100,A100-80GB"
        cpu = 0.5
        env = {{ AWS_ENDPOINT_URL = "{s3_env.endpoint}" }}
        secrets = {_secrets("modal")}

        [backend.hf-jobs]
        replicas = 2
        image = "{IMAGE}"
        namespace = "our-team"
        secrets = {_secrets("hf-jobs")}
        """
    )
    flags = [
        "--gpu",
        "hf-jobs=a10g-large",
        "--env",
        f"hf-jobs:AWS_ENDPOINT_URL=http://localhost:{port}",
    ]
    return ["launch", str(file), *flags, *(f"--set={k}={v}" for k, v in TINY.items()), "-d", "-y"]


def _secrets(backend: str) -> str:
    access, secret = KEYS[backend]
    return json.dumps([f"AWS_ACCESS_KEY_ID={access}", f"AWS_SECRET_ACCESS_KEY={secret}"])


@pytest.mark.timeout(600)
def test_run_on_two_clouds_is_carried_from_launch_to_result(
    modal_cloud: FakeModal, hub: FakeHub, words: list[str], s3_uri: str, tmp_path: Path
) -> None:
    here, elsewhere = Terminal(tmp_path), Terminal(Path("/"))
    code, preview, err = here.call(*words, "--dry-run")
    assert code == 0, err
    _check_preview(json.loads(preview)["sides"])
    assert (modal_cloud.requests, hub.requests) == ([], [])

    code, out, err = here.call(*words)
    assert (code, out) == (0, f"{RUN_ID}\n"), err
    assert "4 replicas are launched on modal (2) and hf-jobs (2)." in err
    where = (RUN_ID, "--store", s3_uri)
    follower = elsewhere.start("logs", "-f", *where)
    supervisor = elsewhere.start("supervise", *where)
    try:
        until(lambda: in_a_round(s3_uri, range(4)), "a round of all four")
        hub.job_of(3).kill()  # for the supervisor to start again
        modal_cloud.preempt(modal_cloud.calls()[1])  # for Modal to do so
        assert elsewhere.call("wait", *where)[:2] == (0, "SUCCEEDED\n")
        told, err = supervisor.communicate(timeout=60)
        out, logs_err = follower.communicate(timeout=60)
    finally:
        follower.kill()
        supervisor.kill()
    assert (follower.returncode, supervisor.returncode) == (0, 0), logs_err + err
    for rank in range(4):
        assert f"replica/{rank} finished" in out
    check_result(s3_uri, {0: 0, 1: 1, 2: 0, 3: 1})
    _check_status(elsewhere, s3_uri)
    _check_secrets(modal_cloud, hub, preview + out + told + err, stored(s3_uri))
    (app,) = modal_cloud.world.apps.values()
    assert app.state == api_pb2.APP_STATE_STOPPED
    assert elsewhere.call("down", *where, "--yes")[0] == 0


def _check_preview(sides: dict[str, Any]) -> None:
    """Each provider's own requests are under its backend's name."""
    assert list(sides) == ["modal", "hf-jobs"]
    assert [side["request"]["options"]["ranks"] for side in sides.values()] == [[0, 1], [2, 3]]
    assert len(sides["modal"]["provider_requests"]) == 1 + 2
    jobs = sides["hf-jobs"]["provider_requests"]
    assert [job["run_job"]["flavor"] for job in jobs] == ["a10g-large"] * 2


def _check_status(terminal: Terminal, store: str) -> None:
    """``status`` tells where each replica is, and ``ls`` where the run is."""
    code, out, err = terminal.call("status", RUN_ID, "--store", store, "--json")
    assert code == 0, err
    status = json.loads(out)
    assert status["backends"] == ["modal", "hf-jobs"]
    assert [view["backend"] for view in status["replicas"]] == ["modal"] * 2 + ["hf-jobs"] * 2
    assert "137" in status["replicas"][3]["restarted_after"]
    listed = terminal.call("ls", "--store", store)[1]
    assert RUN_ID in listed
    assert "modal+hf-jobs" in listed


def _check_secrets(cloud: FakeModal, hub: FakeHub, shown: str, objects: bytes) -> None:
    """Each side got its own credentials, by its secret channel, and nothing of the other's."""
    values = {
        b: [v.encode() for v in keys]
        for b, keys in zip(KEYS, OTHER_IDENTITIES.values(), strict=True)
    }
    canary = CANARY.encode()
    for value in (*values["modal"], canary):
        assert {name for name, body in cloud.requests if value in body} == {"SecretGetOrCreate"}
    for value in values["hf-jobs"]:
        assert not [name for name, body in cloud.requests if value in body]
    names = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", CANARY_NAME]
    expected = [value.decode() for value in (*values["hf-jobs"], canary)]
    for job in hub.jobs:
        assert [job.spec["secrets"][name] for name in names] == expected
    for request in hub.requests:
        assert not any(value.decode() in request.body for value in values["modal"])
        if CANARY in request.path + request.body:
            body = json.loads(request.body)
            del body["secrets"]
            assert not any(value in json.dumps(body) for value in expected)
    logs = "".join(line for job in hub.jobs for _, line in job.log)
    logs += "".join(entry.text for entry in cloud.world.logs)
    everything = shown.encode() + logs.encode() + objects
    for value in (canary, *(secret for _, secret in values.values())):
        assert value not in everything


def test_side_that_refuses_undoes_the_other(
    modal_cloud: FakeModal, hub: FakeHub, words: list[str], s3_uri: str, tmp_path: Path
) -> None:
    """Modal's calls are made, and then the hub will not have the second job."""
    modal_cloud.hold(new_calls=True)
    hub.queue()
    hub.fault("POST", "/api/jobs/our-team$", 403, skip=1)
    here = Terminal(tmp_path)
    code, out, err = here.call(*words)
    assert (code, out) == (1, ""), err
    assert "hf-jobs" in err
    assert "What had been started on modal and hf-jobs was cancelled." in err
    until(lambda: all(call.result is not None for call in modal_cloud.calls()), "the end of all")
    assert [job.stage for job in hub.jobs] == ["CANCELED"]
    assert len(modal_cloud.calls()) == 2
    (app,) = modal_cloud.world.apps.values()
    assert app.state == api_pb2.APP_STATE_STOPPED  # nothing of the launch is left behind


def test_cancel_finds_what_a_launcher_killed_between_sides_had_started(
    modal_cloud: FakeModal, hub: FakeHub, words: list[str], s3_uri: str, tmp_path: Path
) -> None:
    """It dies while the reply to the third of four calls, the hub's first, is on its way."""
    hub.queue()
    hub.fault("POST", "/api/jobs/our-team$", "stall")
    here = Terminal(tmp_path)
    launcher = here.start(*words)
    try:
        until(lambda: len(hub.jobs) == 1, "the third call")
    finally:
        launcher.kill()
        launcher.communicate()
    announced = [info.key for info in open_store(f"{s3_uri}/{RUN_ID}/replicas").list("")]
    assert sum(key.endswith("0000.json") for key in announced) == 2  # Modal's
    assert sum(key.endswith("intent.json") for key in announced) == 4
    code, _, err = here.call("cancel", RUN_ID, "--store", s3_uri)
    assert code == 0, err
    assert [job.stage for job in hub.jobs] == ["CANCELED"]
    assert hub.jobs[0].spec["labels"]["diloco-run"] == provider_name(s3_uri)
    until(lambda: all(call.result is not None for call in modal_cloud.calls()), "the end of all")
    assert len(modal_cloud.calls()) == 2
