"""A local replica as its state directory and the process table tell of it.

    <state_dir>/<name>-<unique>/        one launch
        callable.pickle                   the entrypoint, if it is a Python callable
        <rank>.<attempt>/               one replica
            spec.json                     what to run; written by the launcher
            process.json                  pids and start tokens; by the runner
            log.txt                       stdout and stderr
            cancel                        that somebody asked for its end; by ``cancel``
            outcome.json, result.pickle   what the entrypoint returned or raised; by the child
            exit.json                     how the process ended; by the runner

Readable by the user only. No secret is ever written here.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from diloco_cloud.executor import Reason, ReplicaHandle, ReplicaStatus
from diloco_cloud.executors.local.logs import tail
from diloco_cloud.executors.local.runner import is_alive

BACKEND_NAME: Final = "local_process"


@dataclass(frozen=True)
class LocalReplica:
    """Where a replica's state is, and which processes are its own.

    Attributes:
        directory: its state directory.
        host: the machine it runs on.
        attempt: which life of its rank it is.
        start_ts: seconds since the epoch.
        pid: of the replica, and of its process group.
        pid_start: start token of ``pid``; None if it ended at once.
        runner_pid: of the process that stands by it.
        runner_start: start token of ``runner_pid``.
    """

    directory: str
    host: str
    attempt: int
    start_ts: float
    pid: int
    pid_start: str | None
    runner_pid: int
    runner_start: str

    @classmethod
    def of(cls, handle: ReplicaHandle) -> LocalReplica | None:
        """The replica of a handle, or None if this executor did not make the handle."""
        try:
            return cls(**handle.metadata) if handle.backend_name == BACKEND_NAME else None
        except TypeError:
            return None

    @classmethod
    def started(
        cls, directory: Path, spec: dict[str, Any], processes: dict[str, Any]
    ) -> LocalReplica:
        """A replica from what its launcher and its runner wrote down."""
        return cls(str(directory), spec["host"], spec["attempt"], **processes)

    def handle(self, rank: int) -> ReplicaHandle:
        return ReplicaHandle(rank, BACKEND_NAME, asdict(self))

    def path(self, name: str) -> Path:
        return Path(self.directory, name)

    @property
    def log(self) -> Path:
        return self.path("log.txt")

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def has_runner(self) -> bool:
        return is_alive(self.runner_pid, self.runner_start)

    def status(self) -> ReplicaStatus:
        """The replica's state now."""
        record = _read_json(self.path("exit.json"))
        if record is None and not self.is_here:
            message = f"runs on {self.host}, which {socket.gethostname()} cannot see"
            return ReplicaStatus("unknown", message=message)
        if record is None and self.has_runner():
            return ReplicaStatus("running")
        # The runner may have written the record and ended between the two looks.
        record = record or _read_json(self.path("exit.json"))
        if record is not None:
            return self._ended(record)
        if is_alive(self.pid, self.pid_start):
            return ReplicaStatus("running", message="its runner is dead: no timeout is enforced")
        return self._ended_unseen()

    def _ended(self, record: dict[str, Any]) -> ReplicaStatus:
        code, stopped = record["exit_code"], record["reason"]
        if stopped == "cancelled":
            return ReplicaStatus("cancelled", exit_code=code, reason="cancelled")
        if stopped is not None:
            message = _STOPPED[stopped]
            return ReplicaStatus("failed", exit_code=code, reason=stopped, message=message)
        if code == 0:
            return ReplicaStatus("succeeded", exit_code=0)
        outcome = self.outcome()
        reason: Reason = outcome.get("reason") or "exit_code"
        message = outcome.get("error") or self._describe_exit(code)
        return ReplicaStatus("failed", exit_code=code, reason=reason, message=message)

    def _ended_unseen(self) -> ReplicaStatus:
        """The state of a replica whose runner was killed before it could write the exit record."""
        outcome = self.outcome()
        if outcome.get("ok"):
            return ReplicaStatus("succeeded")
        if "error" in outcome:
            reason: Reason = outcome.get("reason") or "exit_code"
            return ReplicaStatus("failed", exit_code=1, reason=reason, message=outcome["error"])
        if self.path("cancel").exists():
            return ReplicaStatus("cancelled", reason="cancelled")
        return ReplicaStatus("failed", reason="lost", message="its processes are gone")

    def _describe_exit(self, code: int) -> str:
        if code >= 0:
            lines = tail(self.log, 20).split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "")
            return last or f"exited with code {code}"
        hint = " (perhaps out of memory)" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"

    def outcome(self) -> dict[str, Any]:
        """What the child left of its call: ``ok`` and a result, or an error; {} if nothing."""
        return _read_json(self.path("outcome.json")) or {}

    def result(self) -> Any:
        """What the entrypoint returned.

        Raises:
            Exception: whatever unpickling raises, where the result's class is not importable here.
        """
        outcome = self.outcome()
        if not outcome.get("pickled"):
            return outcome.get("result")
        # Written by our own child into a directory only this user can write to.
        return pickle.loads(self.path("result.pickle").read_bytes())


def recorded_handles(state_dir: Path, name: str) -> list[ReplicaHandle]:
    """Handles of all replicas ever launched here under a name, in no particular order."""
    handles = []
    for path in state_dir.glob(f"{launch_prefix(name)}{'?' * _UNIQUE}/*/process.json"):
        spec, processes = _read_json(path.with_name("spec.json")), _read_json(path)
        if spec is not None and processes is not None:
            replica = LocalReplica.started(path.parent, spec, processes)
            handles.append(replica.handle(spec["rank"]))
    return handles


def launch_prefix(name: str) -> str:
    """What the directory of a launch begins with; the rest makes it unique."""
    return re.sub(r"[^A-Za-z0-9.-]", "-", name)[:60] + "-"


#: Characters that ``tempfile.mkdtemp`` adds to a prefix.
_UNIQUE: Final = 8
_STOPPED: Final = {
    "timeout": "ran past its timeout and was stopped",
    "preempted": "was stopped by the system",
}


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return value


def default_state_dir() -> Path:
    """``$DILOCO_HOME/local``, or the place for state by the XDG base directory specification."""
    home = os.environ.get("DILOCO_HOME")
    if home:
        return Path(home, "local").absolute()
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state, "diloco-cloud", "local").absolute()
