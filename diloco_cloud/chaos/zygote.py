"""A process that has imported everything, and forks replicas.

    python -m diloco_cloud.chaos.zygote DESCRIPTOR LOCK GRACE MODULE…

What a provider's warm pool does for containers: a replica starts in a tenth of a second, where a
fresh interpreter spends five seconds of CPU on imports. Without it a storm on a laptop would
measure the imports.

The zygote has one thread, because a fork copies only one: the numerical libraries are told so by
the environment, and nothing is computed before a fork. It is driven through one pipe, by one
launcher. When the launcher is gone the pipe ends, and so does the zygote; when the zygote is gone,
by any signal, the kernel kills the replicas: nothing is left running.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType
from typing import Any, Final

from diloco_cloud.chaos.records import write_json

_PR_SET_PDEATHSIG: Final = 1
_FORK: Final = multiprocessing.get_context("fork")


@dataclass
class _Life:
    """A replica's process.

    Attributes:
        stop_at: when it is asked to end, by the monotonic clock.
        kill_at: when it is made to.
        reason: why it was asked.
    """

    process: ForkProcess
    directory: Path
    stop_at: float
    kill_at: float = float("inf")
    reason: str | None = None

    @property
    def due(self) -> float:
        return self.stop_at if self.reason is None else self.kill_at


class Zygote:
    """Forks what the launcher orders, and writes down how it ended.

    Args:
        pipe: to the launcher.
        grace: seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, pipe: Connection, grace: float) -> None:
        self._pipe = pipe
        self._grace = grace
        self._lives: list[_Life] = []
        self._woken, self._waker = os.pipe()

    def run(self) -> None:
        """Serve until the launcher is gone."""
        self._listen()
        while True:
            due = min((life.due for life in self._lives), default=float("inf"))
            left = max(0.0, due - time.monotonic())
            ready = wait([self._pipe, self._woken], timeout=min(left, 86_400.0))
            if self._woken in ready:
                os.read(self._woken, 4096)
            if self._pipe in ready and not self._obey():
                break
            self._look_after()
        for life in self._lives:
            life.process.kill()

    def _listen(self) -> None:
        """Wake up at a child's end, and when somebody has asked for one's."""
        for end in (self._woken, self._waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for signum in (signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(signum, _note)

    # -- orders --------------------------------------------------------------------------------

    def _obey(self) -> bool:
        """Start the replica that was ordered; False if there is nobody to order one any more."""
        try:
            order = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            return False
        try:
            answer: dict[str, Any] = {"pid": self._start(order)}
        except OSError as error:
            answer = {"error": str(error)}
        with contextlib.suppress(OSError):  # the next wait finds that nobody is there
            self._pipe.send_bytes(json.dumps(answer).encode())
        return True

    def _start(self, order: dict[str, Any]) -> int:
        process = _FORK.Process(target=self._live, args=(order, os.getpid()), name="replica")
        process.start()
        directory, timeout = Path(order["directory"]), order["timeout"]
        self._lives.append(_Life(process, directory, time.monotonic() + timeout))
        assert process.pid is not None
        return process.pid

    def _look_after(self) -> None:
        """Record what has ended, and end what is due."""
        now = time.monotonic()
        for life in tuple(self._lives):
            if not life.process.is_alive():
                self._lives.remove(life)
                self._record(life)
            elif life.reason is None:
                if (life.directory / "cancel").exists():
                    self._stop(life, "cancelled", now)
                elif now >= life.stop_at:
                    self._stop(life, "timeout", now)
            elif now >= life.kill_at:
                life.process.kill()
                life.kill_at = float("inf")

    def _stop(self, life: _Life, reason: str, now: float) -> None:
        life.reason, life.kill_at = reason, now + self._grace
        _signal_group(life, signal.SIGTERM)
        _signal_group(life, signal.SIGCONT)  # one that was stopped could not obey

    def _record(self, life: _Life) -> None:
        _signal_group(life, signal.SIGKILL)  # as when a container ends
        code = life.process.exitcode
        record = {"exit_code": code, "reason": life.reason, "ended_at": time.time()}
        with contextlib.suppress(OSError):  # the directory was deleted: nobody will ask
            write_json(life.directory / "exit.json", record)
        life.process.close()

    # -- in the child --------------------------------------------------------------------------

    def _live(self, order: dict[str, Any], zygote: int) -> None:
        """Become a replica."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:  # it died before the line above
            os._exit(1)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(signum, signal.SIG_DFL)
        self._pipe.close()
        os.close(self._woken)
        os.close(self._waker)
        directory = Path(order["directory"])
        _redirect_output(directory / "log.txt")
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.path[:] = order["sys_path"]
        time.sleep(order["start_s"])
        _run(order, directory)


def _note(signum: int, frame: FrameType | None) -> None:
    """The byte in the wake-up pipe says it all."""


def _signal_group(life: _Life, signum: int) -> None:
    assert life.process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(life.process.pid, signum)


def _redirect_output(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


def _run(order: dict[str, Any], directory: Path) -> None:
    """Call the entrypoint, and leave what it came to."""
    try:
        result = _call(order)
    except Exception as error:
        lines = str(error).strip().splitlines()
        name = type(error).__name__
        message = f"{name}: {lines[0]}" if lines else name
        write_json(directory / "outcome.json", {"ok": False, "error": message})
        if getattr(error, "_diloco_logged", False):  # a second traceback would say nothing new
            sys.exit(1)
        raise
    write_json(directory / "outcome.json", {"ok": True, "result": _plain(result)})


def _call(order: dict[str, Any]) -> Any:
    if "script" in order:
        sys.argv = [order["script"], *order["args"]]
        runpy.run_path(order["script"], run_name="__main__")
        return None
    sys.argv = [order["module"]]
    function = getattr(importlib.import_module(order["module"]), order["function"])
    return function(**order["arguments"])


def _plain(value: Any) -> Any:
    """``value`` if JSON can hold it, else None."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return None
    return value


def main() -> None:
    """Import what replicas will need, say so, and serve."""
    descriptor, lock, grace, *modules = sys.argv[1:]
    pipe = Connection(int(descriptor))
    # Children inherit it, so that it is free when the last of them is gone.
    lock_descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock_descriptor, fcntl.LOCK_EX)
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, every page of it
    pipe.send_bytes(json.dumps({"pid": os.getpid()}).encode())
    Zygote(pipe, float(grace)).run()


if __name__ == "__main__":
    main()
