"""A launched replica in a process of its own, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from diloco_cloud import keys
from diloco_cloud.errors import NotFoundError
from diloco_cloud.run.spec import RunSpec
from diloco_cloud.store import open_store
from diloco_cloud.store.base import ObjectStore

#: For what takes a moment on a machine that is not busy.
SOON_S = 20.0
#: Loading torch on a busy machine takes its time.
STARTED_S = 120.0


def python_path() -> str:
    """With the tests' train functions on it."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(Path(__file__).parent), *([given] if given else [])])


def eventually(what: Callable[[], bool], timeout_s: float) -> float:
    """Seconds until ``what`` is true; an assertion that it will be."""
    started = time.monotonic()
    while not what():
        assert time.monotonic() - started < timeout_s, "it did not happen in time"
        time.sleep(0.02)
    return time.monotonic() - started


@dataclass
class ReplicaProcess:
    """Rank 0 of a run that trains with a function of ``trainers_for_tests``, or of ``module``."""

    folder: Path
    function: str
    replicas: int = 1
    trainer_args: dict[str, Any] = field(default_factory=dict)
    stdout: Any = subprocess.DEVNULL
    module: str = "trainers_for_tests"
    grace_s: float = 4.0
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.uri = str(self.folder / "run")
        self.store: ObjectStore = open_store(self.uri)
        spec = RunSpec(
            run_id="run",
            trainer=f"{self.module}:{self.function}",
            replicas=self.replicas,
            trainer_args=self.trainer_args,
            **self.settings,
        )
        record = {"hash": spec.digest, "spec": spec.to_json()}
        self.store.create(keys.RUN, json.dumps(record).encode())
        self.flags = ["--rendezvous-uri", self.uri, "--spec-hash", spec.digest]
        self.process = self._start(attempt=0)

    def _start(self, attempt: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "diloco_cloud.replica_entrypoint", *self.flags],
            env={
                **os.environ,
                "PYTHONPATH": python_path(),
                "PYTHONUNBUFFERED": "",  # a stream without a buffer cannot fail at exit
                "REPLICA_RANK": "0",
                "DILOCO_ATTEMPT": str(attempt),
                "DILOCO_TERM_GRACE_S": str(self.grace_s),
            },
            cwd=self.folder,
            stdout=self.stdout,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for_file(self, name: str) -> None:
        """Wait until the trainer has created a file."""
        eventually((self.folder / name).exists, STARTED_S)

    def restart(self) -> None:
        """Begin the rank's second life, after the end of the first."""
        self.process.communicate()
        self.process = self._start(attempt=1)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def logs(self) -> str:
        """The log lines that have reached the prefix."""
        chunks = (self.store.get(info.key) for info in self.store.list(keys.LOGS))
        return b"".join(chunks).decode()

    def beat(self) -> dict[str, Any]:
        """The newest sign of life."""
        values: dict[str, Any] = json.loads(self.store.get(keys.alive(0)))
        return values

    def outcome(self) -> dict[str, Any] | None:
        try:
            values: dict[str, Any] = json.loads(self.store.get(keys.outcome(0, 0)))
        except NotFoundError:
            return None
        return values

    def end(self) -> tuple[int, dict[str, Any]]:
        """Exit code and outcome, once the process has ended."""
        code = self.process.wait(SOON_S)
        outcome = self.outcome()
        assert outcome is not None
        return code, outcome

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # and what it has forked
        self.process.communicate()


Start: TypeAlias = Callable[..., ReplicaProcess]
