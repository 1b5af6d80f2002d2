"""One trainer in two processes (torch's DDP over gloo) against one with the same batch; and two
replicas of it with adapters."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import two_processes
from replicas import result_in
from safetensors.torch import load_file

pytestmark = tiny.pytestmark


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def on_two(where: Path) -> list[dict[str, Any]]:
    """What each of two processes ended with, in all cases."""
    port = str(free_port())
    started = [
        subprocess.Popen(
            [sys.executable, two_processes.__file__, str(where), str(rank), port],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [each.communicate(timeout=240)[0] for each in started]
    finally:
        for each in started:
            each.kill()
    assert [each.returncode for each in started] == [0, 0], "\n".join(said)
    return [torch.load(where / f"{rank}.pt") for rank in range(2)]


def assert_merged(where: Path, replicas: list[dict[str, Any]]) -> None:
    """Two replicas ended with one adapter, and it is the run's result."""
    assert replicas[0]["digest"] == replicas[1]["digest"]
    assert [end["outer_steps"] for end in replicas] == [2, 2]
    assert all(end["sdpo_active"] > 0 for end in replicas)
    final = load_file(result_in(where / "run") / "model.safetensors")
    assert final
    assert all("lora_" in name and value.isfinite().all() for name, value in final.items())


def test_trainer_of_two_processes_is_one_with_the_whole_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All channels; an adapter, with activations computed twice; channel 2 alone.

    The processes are two replicas before, each with an adapter of its own.
    """
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    both = on_two(tmp_path)
    assert_merged(tmp_path, [found["replica"] for found in both])
    for case in two_processes.CASES:
        whole = two_processes.trained(case, tmp_path / "one", 1)
        first, second = (found[case] for found in both)
        assert whole["activity"]["sdpo"]["active"] > 0
        assert first["activity"] == second["activity"] == whole["activity"], case
        assert first["tokens"] + second["tokens"] == whole["tokens"], case
        assert whole["parameters"].keys() == first["parameters"].keys()
        for name, expected in whole["parameters"].items():
            where = f"{case}: {name}"
            assert torch.equal(first["parameters"][name], second["parameters"][name]), where
            torch.testing.assert_close(
                first["parameters"][name], expected, rtol=1e-4, atol=2e-6, msg=where
            )
        for key, expected in whole["history"].items():
            assert first["history"][key] == pytest.approx(expected, rel=1e-4, abs=1e-6), (case, key)
