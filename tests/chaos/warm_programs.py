"""What the replicas of these tests run."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def environment(names: list[str]) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def speak(**arguments: Any) -> dict[str, Any]:
    for number in range(3):
        sys.stdout.write(f"line {number} of replica {os.environ['REPLICA_RANK']}\n")
    sys.stderr.write("and an error\n")
    return arguments


def fail() -> None:
    raise ValueError("on purpose")


def leave(code: int) -> None:
    sys.exit(code)


def sleep(ready: str = "") -> None:
    if ready:
        Path(ready).touch()
    time.sleep(120)


def ignore_sigterm(ready: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep(ready)


def modules() -> list[str]:
    return [name for name in ("torch", "numpy") if name in sys.modules]
