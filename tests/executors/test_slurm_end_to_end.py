"""A run on Slurm from launch to result, with a replica that is preempted on the way."""

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
    Terminal,
    check_result,
    in_a_round,
    launch_words,
    stored,
    until,
)
from fakes.slurm_cluster import Cluster
from servers import S3Server
from slurm_fixtures import fake_slurm, real_slurm, truest_slurm

from diloco_cloud.run import Run

__all__ = ["fake_slurm", "real_slurm", "truest_slurm"]


def test_run_is_carried_from_launch_to_result(
    truest_slurm: Cluster,
    s3_env: S3Server,
    s3_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CANARY_NAME, CANARY)
    shared = tmp_path / "shared"
    settings = {"directory": str(shared), "partition": "long"}
    words = launch_words("slurm", settings, s3_env, s3_uri, rounds=ROUNDS)
    words += ["--quorum", "3"]  # no round without all three
    here, elsewhere = Terminal(tmp_path), Terminal(Path("/"))

    code, preview, err = here.call(*words, "--dry-run")
    assert code == 0, err
    (request,) = json.loads(preview)["provider_requests"]
    assert request["command"][0] == "sbatch"
    code, out, err = here.call(*words)
    assert (code, out) == (0, f"{RUN_ID}\n"), err
    where = (RUN_ID, "--store", s3_uri)
    follower = elsewhere.start("logs", "-f", *where)
    try:
        until(lambda: in_a_round(s3_uri, [0, 1, 2]), "a round of all three")
        handle = Run.open(s3_uri, RUN_ID)._observer.handles()[1][1]
        assert handle is not None
        job = handle.handle.metadata["job"]
        truest_slurm.preempt(f"{job}_1")  # which hands over, and is queued again by Slurm itself

        out, err = follower.communicate(timeout=DEADLINE_S)
    finally:
        follower.kill()
    assert follower.returncode == 0, err
    assert elsewhere.call("wait", *where)[:2] == (0, "SUCCEEDED\n")
    for rank in range(3):
        assert f"replica/{rank} finished" in out
    check_result(s3_uri, {0: 0, 1: 1, 2: 0})
    assert RUN_ID in elsewhere.call("ls", "--store", s3_uri)[1]
    _check_secrets(truest_slurm, shared, preview, out, stored(s3_uri))
    assert elsewhere.call("down", *where, "--yes")[0] == 0
    assert list(shared.iterdir()) == []


def _check_secrets(cluster: Cluster, shared: Path, preview: str, out: str, objects: bytes) -> None:
    """The canary is nowhere: not even in its own file, which is gone with the replicas."""
    files = b"".join(path.read_bytes() for path in shared.rglob("*") if path.is_file())
    assert b"finished" in files
    for place in (cluster.kept(), files, preview.encode(), out.encode(), objects):
        assert CANARY.encode() not in place
