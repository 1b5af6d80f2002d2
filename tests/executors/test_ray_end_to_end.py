"""A run on Ray from launch to result, with a replica that is killed on the way."""

from __future__ import annotations

import json
import os
import signal
import sys
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
    stored,
    until,
)
from fakes.ray_dashboard import FakeDashboard
from ray_fixtures import dashboard, head_address, real_head
from servers import S3Server

from diloco_cloud.store import open_store

__all__ = ["dashboard", "head_address", "real_head"]


@pytest.fixture(params=["fake", "real"])
def address(request: pytest.FixtureRequest) -> str:
    """Of a cluster: one that acts Ray, or a real head."""
    if request.param == "fake":
        fake: FakeDashboard = request.getfixturevalue("dashboard")
        return fake.address
    real: str = request.getfixturevalue("real_head")
    return real


def test_run_is_carried_from_launch_to_result(
    address: str,
    request: pytest.FixtureRequest,
    s3_env: S3Server,
    s3_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CANARY_NAME, CANARY)
    shared = tmp_path / "shared"
    settings = {
        "address": address,
        "python": sys.executable,
        "cpus": 0.5,
        "secrets_dir": str(shared),
        "grace": 5,
    }
    words = launch_words("ray", settings, s3_env, s3_uri, rounds=ROUNDS)
    words += ["--quorum", "3"]  # no round without all three
    here, elsewhere = Terminal(tmp_path), Terminal(Path("/"))

    code, preview, err = here.call(*words, "--dry-run")
    assert code == 0, err
    assert len(json.loads(preview)["provider_requests"]) == 3
    code, out, err = here.call(*words)
    assert (code, out) == (0, f"{RUN_ID}\n"), err
    where = (RUN_ID, "--store", s3_uri)
    follower = elsewhere.start("logs", "-f", *where)
    supervisor = elsewhere.start("supervise", *where)
    try:
        until(lambda: in_a_round(s3_uri, [0, 1, 2]), "a round of all three")
        beat = json.loads(open_store(f"{s3_uri}/{RUN_ID}").get("alive/0001.json"))
        os.kill(beat["pid"], signal.SIGKILL)

        out, err = follower.communicate(timeout=DEADLINE_S)
        assert supervisor.wait(timeout=DEADLINE_S) == 0
    finally:
        follower.kill()
        supervisor.kill()
        supervisor.communicate()
    assert follower.returncode == 0, err
    assert elsewhere.call("wait", *where)[:2] == (0, "SUCCEEDED\n")
    for rank in range(3):
        assert f"replica/{rank} finished" in out
    check_result(s3_uri, {0: 0, 1: 1, 2: 0})
    assert RUN_ID in elsewhere.call("ls", "--store", s3_uri)[1]
    assert list(shared.iterdir()) == []  # each replica has taken its secrets
    asked = [preview, out, *_requests(request)]
    assert [text for text in asked if CANARY in text] == []
    assert CANARY.encode() not in stored(s3_uri)
    assert elsewhere.call("down", *where, "--yes")[0] == 0


def _requests(request: pytest.FixtureRequest) -> list[str]:
    if "fake" not in request.node.name:
        return []
    fake: FakeDashboard = request.getfixturevalue("dashboard")
    return [body for _, body in fake.requests]
