"""A warm replica as its directory tells of it.

    <state_dir>/zygote-<unique>.lock         held for as long as a zygote or a child of it lives
    <state_dir>/<name>-<unique>/             one launch
        <rank>.<attempt>/                    one replica
            log.txt                            stdout and stderr
            cancel                             that somebody asked for its end
            outcome.json                       what the entrypoint came to; by the replica
            exit.json                          how the process ended; by the zygote

Readable by the user only. No secret is ever written here.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from diloco_cloud.executor import Reason, ReplicaHandle, ReplicaStatus

BACKEND_NAME: Final = "warm_process"
_TAIL_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class WarmReplica:
    """Where a replica's records are, and which processes are its own.

    Attributes:
        directory: its records.
        lock: of its zygote.
        zygote_pid: of the process that forked it.
        pid: its own.
        attempt: which life of its rank it is.
        host: the machine it runs on.
    """

    directory: str
    lock: str
    zygote_pid: int
    pid: int
    attempt: int
    host: str = field(default_factory=socket.gethostname)

    @classmethod
    def of(cls, handle: ReplicaHandle) -> WarmReplica | None:
        """The replica of a handle, or None if this executor did not make the handle."""
        try:
            return cls(**handle.metadata) if handle.backend_name == BACKEND_NAME else None
        except TypeError:
            return None

    def handle(self, rank: int) -> ReplicaHandle:
        return ReplicaHandle(rank, BACKEND_NAME, asdict(self))

    def status(self) -> ReplicaStatus:
        """The replica's state now."""
        if self.host != socket.gethostname():
            return ReplicaStatus("unknown", message=f"runs on {self.host}")
        record = read_json(self._path("exit.json"))
        if record is None and is_locked(self.lock):
            return ReplicaStatus("running")
        # Its end may have been recorded between the two looks.
        record = record or read_json(self._path("exit.json"))
        if record is None:
            return ReplicaStatus("failed", reason="lost", message="its processes are gone")
        return self._ended(record["exit_code"], record["reason"])

    def cancel(self) -> None:
        """Ask its zygote to end it."""
        if self.status() != "running":
            return
        self._path("cancel").touch()
        # The lock was held a moment ago, so this is still the zygote, or nobody.
        try:
            os.kill(self.zygote_pid, signal.SIGUSR1)
        except ProcessLookupError:
            return

    def outcome(self) -> dict[str, Any]:
        """What the entrypoint came to: ``ok`` and a result, or an error; {} if nothing."""
        return read_json(self._path("outcome.json")) or {}

    def log(self, n_lines: int) -> str:
        """The last lines of stdout and stderr."""
        try:
            with self._path("log.txt").open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            return ""
        return b"".join(lines[-n_lines:] if n_lines > 0 else []).decode(errors="replace")

    def _path(self, name: str) -> Path:
        return Path(self.directory, name)

    def _ended(self, code: int, reason: Reason | None) -> ReplicaStatus:
        if reason == "cancelled":
            return ReplicaStatus("cancelled", exit_code=code, reason=reason)
        if reason == "timeout":
            message = "ran past its timeout and was stopped"
            return ReplicaStatus("failed", exit_code=code, reason=reason, message=message)
        if code == 0:
            return ReplicaStatus("succeeded", exit_code=0)
        if code < 0:
            message = f"killed by {signal.Signals(-code).name}"
        else:
            message = self.outcome().get("error") or f"exited with code {code}"
        return ReplicaStatus("failed", exit_code=code, reason="exit_code", message=message)


def is_locked(path: str) -> bool:
    """Whether a live process holds the lock."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no file."""
    try:
        value: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return value


def write_json(path: Path, value: object) -> None:
    """Create or replace a file so that a reader sees all of it or nothing."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(path)
