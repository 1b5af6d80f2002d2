"""Stands by one replica for as long as it runs, and writes down how it ended.

Executed by path, in isolated mode: ``python -I -S runner.py run DIRECTORY``. There is one per
replica, so it imports the standard library only (20 ms, 11 MiB) and depends on nothing that the
user's environment could break.

The runner leaves the launcher's session and is nobody's child, so it survives the launcher and its
terminal. The replica is its child, in a process group of its own:

* at the end of the replica, whatever is left of its group is killed, as when a container ends;
* SIGTERM to the runner (``cancel``, or a machine going down), or the timeout, sends SIGTERM to the
  group and SIGKILL after the grace period. The escalation happens here so that no canceller has to
  stay for it;
* SIGKILL to the runner leaves the replica running. Dying with its parent (PR_SET_PDEATHSIG) would
  turn a lost bookkeeper into lost training; instead a replica without a runner is found by its own
  pid, counts as running, and ``stop`` takes over what is left to do: its cancellation.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any

#: Seconds between two looks at a process that is not our child.
_POLL = 0.05


def write_json(path: str, value: object) -> None:
    """Create or replace a file so that a reader sees all of it or nothing.

    Not flushed to the disk: after a power cut the replica is lost whatever this file says.
    """
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(temporary, path)


def start_token(pid: int) -> str | None:
    """When a live process started, or None if it is not alive.

    With the pid it names one process for ever; a pid alone is soon given to another one.
    """
    if sys.platform != "linux":
        return _start_token_from_ps(pid)
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field is the program's name in parentheses, and may contain any byte.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else f"{_boot_id()}.{fields[19].decode()}"


def is_alive(pid: int, token: str | None) -> bool:
    """Whether the process that had this pid and start token still runs."""
    return token is not None and start_token(pid) == token


def _boot_id() -> str:
    """Start times count from the boot; this tells one boot from another."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read(8)


def _start_token_from_ps(pid: int) -> str | None:
    output = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)],
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    state, _, started = output.strip().partition(" ")
    return None if not state or state.startswith("Z") else " ".join(started.split())


def _signal_group(pgid: int, signum: int) -> None:
    """Signal a process group; one that has ended needs no signal."""
    # PermissionError is what macOS says of a group that has only zombies left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signum)


class _Signals:
    """SIGCHLD and SIGTERM as events to wait for, so that nothing is polled."""

    def __init__(self) -> None:
        self.stop_requested = False
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # Handlers rather than SIG_IGN: what is ignored stays ignored in the replica.
        for signum in (signal.SIGCHLD, signal.SIGHUP):
            signal.signal(signum, self._note)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._stop)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        pass

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self.stop_requested = True

    def wait(self, until: float) -> None:
        """Return at the next signal, or at ``until`` by the monotonic clock."""
        seconds = max(0.0, until - time.monotonic())
        if select.select([self._reader], [], [], min(seconds, 86_400.0))[0]:
            os.read(self._reader, 4096)


def _supervise(
    child: subprocess.Popen[bytes], signals: _Signals, timeout: float, grace: float, directory: str
) -> str | None:
    """Wait for the child to end; return why it was made to, if it was."""
    deadline = time.monotonic() + timeout
    kill_at = float("inf")
    reason = None
    while child.poll() is None:  # first of all: a child that has ended is not stopped any more
        now = time.monotonic()
        if reason is None and (signals.stop_requested or now >= deadline):
            reason = _reason_to_stop(signals, directory)
            kill_at = now + grace
            # To the replica alone: it may need its helpers to end in order, as to finish a step.
            child.send_signal(signal.SIGTERM)
        elif now >= kill_at:
            _signal_group(child.pid, signal.SIGKILL)
            kill_at = float("inf")
        signals.wait(kill_at if reason is not None else deadline)
    _signal_group(child.pid, signal.SIGKILL)
    return reason


def _reason_to_stop(signals: _Signals, directory: str) -> str:
    if not signals.stop_requested:
        return "timeout"
    # Without a request on file the SIGTERM came from the system: it is shutting down.
    return "cancelled" if os.path.exists(os.path.join(directory, "cancel")) else "preempted"


def _report(value: dict[str, Any]) -> None:
    """Answer the launcher on stdout, then let go of it."""
    with os.fdopen(1, "w", encoding="utf-8") as pipe:
        json.dump(value, pipe)
    os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor: stdout again


def run(directory: str) -> None:
    """Start the replica described in ``directory``, report its pid, and see it through."""
    with open(os.path.join(directory, "spec.json"), encoding="utf-8") as file:
        spec = json.load(file)
    signals = _Signals()
    try:
        with open(os.path.join(directory, "log.txt"), "ab") as log:
            child = subprocess.Popen(
                spec["argv"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )
    except OSError as error:
        _report({"error": str(error)})
        return
    processes = {
        "pid": child.pid,
        "pid_start": start_token(child.pid),
        "runner_pid": os.getpid(),
        "runner_start": start_token(os.getpid()),
        "start_ts": time.time(),
    }
    try:
        write_json(os.path.join(directory, "process.json"), processes)
        _report(processes)
    except OSError:
        # The launcher died before it knew of this replica, so nobody would ever look for it.
        signals.stop_requested = True
    reason = _supervise(child, signals, spec["timeout"], spec["grace"], directory)
    _write_exit(directory, child.returncode, reason)


def stop(directory: str) -> None:
    """End a replica whose runner is dead, and write its exit record."""
    _report({})
    with open(os.path.join(directory, "spec.json"), encoding="utf-8") as file:
        grace = json.load(file)["grace"]
    with open(os.path.join(directory, "process.json"), encoding="utf-8") as file:
        processes = json.load(file)
    pid, token = processes["pid"], processes["pid_start"]
    if is_alive(pid, token):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while is_alive(pid, token) and time.monotonic() < deadline:
            time.sleep(_POLL)
        _signal_group(pid, signal.SIGKILL)
        while is_alive(pid, token):
            time.sleep(_POLL)
    _write_exit(directory, None, "cancelled")


def _write_exit(directory: str, exit_code: int | None, reason: str | None) -> None:
    record = {"exit_code": exit_code, "reason": reason, "ended_at": time.time()}
    write_json(os.path.join(directory, "exit.json"), record)


def main() -> None:
    """Become nobody's child, then do what the arguments say."""
    action, directory = sys.argv[1:]
    if os.fork() == 0:
        {"run": run, "stop": stop}[action](directory)


if __name__ == "__main__":
    main()
