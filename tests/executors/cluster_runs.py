"""A run of the default trainer, carried by the command line from its launch to its result.

Shared by the tests of the backends that drive a cluster somebody already has. Every command is a
process of its own, as on different machines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers import S3Server

from diloco_cloud import keys
from diloco_cloud.run import Run
from diloco_cloud.store import open_store

RUN_ID = "run-1"
#: Of a run in which something is to happen on the way: on an idle machine twenty take a second.
ROUNDS = 48
CANARY_NAME = "CANARY_TOKEN"
CANARY = "canary-51e7a0f4-in-the-mine"
#: Generous: three processes import torch on a machine that does other things too.
DEADLINE_S = 240.0
#: The default trainer, as small as it gets.
TINY = {
    "hidden_size": 16,
    "layers": 1,
    "heads": 2,
    "sequence_length": 16,
    "batch_size": 2,
    "validation_sequences": 2,
}


@dataclass
class Terminal:
    """Calls the command in a directory, as a user would."""

    directory: Path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "diloco_cloud.cli.main", *arguments],
            cwd=self.directory,
            env={k: v for k, v in os.environ.items() if k != "DILOCO_STORE"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
        return process.returncode, out, err


def launch_words(
    backend: str, settings: dict[str, Any], server: S3Server, store: str, *, rounds: int
) -> list[str]:
    """``launch`` of three replicas that reach an S3 server by variables and secrets."""
    words = ["launch", "--backend", backend, "--replicas", "3", "--run-id", RUN_ID, "-d", "--yes"]
    words += ["--store", store, "--rounds", str(rounds), "--sync-every", "2", "--heartbeat", "1"]
    words += [f"--backend-arg={name}={json.dumps(value)}" for name, value in settings.items()]
    words += [f"--set={name}={value}" for name, value in TINY.items()]
    plain = ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_EC2_METADATA_DISABLED")
    words += [f"--env={name}={server.env[name]}" for name in plain]
    hidden = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", CANARY_NAME)
    return words + [f"--secret={name}" for name in hidden]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} never happened"
        time.sleep(0.3)


def in_a_round(store: str, ranks: Sequence[int]) -> bool:
    """Whether replicas have been in a round that was decided.

    By their own words alone: a look at the whole run costs more than a round of theirs.
    """
    prefix = open_store(f"{store}/{RUN_ID}")
    found = [info.key for info in prefix.list("replicas/") if info.key.endswith(".outcome.json")]
    ends = [json.loads(prefix.get(key)) for key in found]
    assert not [end["error"] for end in ends if end["state"] == "failed"]
    alive = {info.key for info in prefix.list("alive/")}
    names = [keys.alive(rank) for rank in ranks]
    return alive.issuperset(names) and all(
        (json.loads(prefix.get(name)).get("round") or 0) >= 2 for name in names
    )


def provider_name(store: str) -> str:
    """What the names of the run's jobs begin with."""
    return Run.open(store, RUN_ID).provider_name


def check_result(store: str, expected_attempts: dict[int, int]) -> None:
    """Every replica has succeeded and ended with the same parameters."""
    run = Run.open(store, RUN_ID)
    status = run.status()
    assert status.state == "succeeded"
    attempts = {view.rank: view.attempt for view in status.replicas}
    assert attempts == expected_attempts, status.replicas
    assert run.results().digest is not None
    assert run.results().model is not None


def stored(store: str) -> bytes:
    """Every object of the store."""
    opened = open_store(store)
    return b"".join(opened.get(info.key) for info in opened.list(""))
