"""What the replicas of these tests run. No torch: a replica is up within a tenth of a second."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def main(**arguments: Any) -> dict[str, Any]:
    return {"main": arguments}


def echo(**arguments: Any) -> dict[str, Any]:
    sys.stdout.write(f"replica {os.environ['REPLICA_RANK']} speaks\n")
    return arguments


def environment(names: list[str]) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def rank_as_tuple() -> tuple[str, int]:
    return ("rank", int(os.environ["REPLICA_RANK"]))


def not_json() -> set[int]:
    return {1, 2}


def fail(message: str) -> None:
    raise ValueError(message)


def fail_on_rank(rank: int) -> str:
    if os.environ["REPLICA_RANK"] == str(rank):
        raise RuntimeError("bad replica")
    return "good"


def run_out_of_memory() -> None:
    raise MemoryError


def leave(code: int) -> None:
    sys.exit(code)


def leave_at_once(code: int) -> None:
    os._exit(code)


def kill_self(signum: int) -> None:
    os.kill(os.getpid(), signum)


def sleep(seconds: float = 120.0) -> str:
    time.sleep(seconds)
    return "slept"


def finish_on_sigterm(ready: str) -> None:
    """Exit with code 0 when asked to stop."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(0))
    Path(ready).touch()
    time.sleep(120)


def ignore_sigterm(ready: str) -> None:
    """Refuse to stop, with a child that refuses too and whose pid is in ``ready``."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # inherited by the child
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(120)"])
    write_whole(ready, str(child.pid))
    time.sleep(120)


def ask_child_on_sigterm(ready: str) -> None:
    """When asked to stop, have a child finish what it does."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: asked.append(signum))
    command = [sys.executable, "-S", "-c", "print(input())"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        Path(ready).touch()
        while not asked:
            time.sleep(0.01)
        write_whole(f"{ready}.answer", child.communicate("finished")[0].strip())


def leave_child_behind(ready: str) -> None:
    """Return while a child still runs."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(120)"])
    write_whole(ready, str(child.pid))
    child.returncode = 0  # do not warn that it is still running


def wait_for_file(path: str) -> str:
    """Return when ``path`` exists."""
    while not os.path.exists(path):
        time.sleep(0.01)
    return "found"


def write_whole(path: str, text: str) -> None:
    Path(f"{path}.part").write_text(text)
    os.replace(f"{path}.part", path)


def fail_on_file(path: str) -> None:
    """Raise when ``path`` exists."""
    raise RuntimeError(wait_for_file(path))


def speak_then_wait(path: str, lines: int) -> None:
    rank = os.environ["REPLICA_RANK"]
    for number in range(lines):
        sys.stdout.write(f"{rank}: line {number}\n")
    wait_for_file(path)
    sys.stderr.write(f"{rank}: to stderr\n")
