"""The outer loop equals DiLoCo written by hand, to the bit, on every replica."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from replicas import Job, by_hand, train, train_with_torchft

RunJob = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run_job(pool: ProcessPoolExecutor, tmp_path: Path) -> RunJob:
    def run(job: Job, uri: str | None = None, **settings: Any) -> list[dict[str, Any]]:
        uri = str(tmp_path / "run") if uri is None else uri
        replicas = [pool.submit(train, job, uri, r, **settings) for r in range(job.world_size)]
        return [replica.result(timeout=120) for replica in replicas]

    return run


def assert_same_bits(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), (a - b).abs().max()


def assert_equals_reference(replicas: list[dict[str, Any]], job: Job) -> None:
    reference = by_hand(job)
    for rank, replica in enumerate(replicas):
        assert_same_bits(replica["globals"], reference["globals"])
        for mine, hers in zip(replica["momentum"], reference["momentum"], strict=True):
            assert mine.keys() == hers.keys()
            assert_same_bits(list(mine.values()), list(hers.values()))
        assert replica["losses"] == reference["losses"][rank]
        assert replica["digest"] == replicas[0]["digest"]
        assert replica["bases"] == replicas[0]["bases"]
        assert len(replica["bases"]) == reference["rounds"]


MATRIX = [
    Job(model, world_size, fragments, delay=delay, steps=14 if model == "qwen2" else 26)
    for model in ("mlp", "qwen2")
    for world_size in (2, 3, 4)
    for fragments in (1, 3)
    for delay in (0, 1)
]


@pytest.mark.parametrize(
    "job",
    [
        *MATRIX,
        Job(world_size=4, reduction="sharded"),
        Job(world_size=3, fragments=3, delay=1, alpha=0.25),
        Job(delay=2, alpha=0.5),
        Job(delay=5),
        Job(dtype=torch.bfloat16),
        Job(fragments=3, steps=23, delay=1),
    ],
    ids=str,
)
def test_replicas_equal_hand_written_diloco(run_job: RunJob, job: Job) -> None:
    assert_equals_reference(run_job(job), job)


def test_model_holds_global_parameters_at_the_end(run_job: RunJob) -> None:
    job = Job(steps=22, alpha=0.5)
    first, second = run_job(job)
    assert_same_bits(first["model"], first["globals"])
    assert_same_bits(first["model"], second["model"])


@pytest.mark.parametrize("job", [Job(), Job(delay=2, alpha=0.5)], ids=str)
def test_weights_equal_torchft_manager_over_gloo_at_every_step(
    run_job: RunJob, pool: ProcessPoolExecutor, job: Job
) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=job.world_size)
    try:
        port = lighthouse.address().rpartition(":")[2].rstrip("/")
        address = f"http://127.0.0.1:{port}"
        theirs = [pool.submit(train_with_torchft, job, address, r) for r in range(job.world_size)]
        expected = [replica.result(timeout=120)["weights"] for replica in theirs]
    finally:
        lighthouse.shutdown()
    for mine, their in zip(run_job(job), expected, strict=True):
        assert len(mine["weights"]) == len(their) == job.steps
        for at_mine, at_their in zip(mine["weights"], their, strict=True):
            assert_same_bits(at_mine, at_their)


def test_same_result_through_s3(run_job: RunJob, s3_uri: str) -> None:
    job = Job(world_size=3, fragments=3, delay=1, reduction="sharded")
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    assert_equals_reference(run_job(job, uri=s3_uri, environ=aws), job)
