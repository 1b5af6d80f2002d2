"""What the replicas of the contract suite run: short, without torch, telling all in their logs."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

#: Before each JSON value that a program tells.
MARK: Final = "contract-suite:"


def say(value: Any) -> None:
    """Tell one JSON value, on a line of its own that the suite finds among others."""
    sys.stdout.write(f"{MARK}{json.dumps(value)}\n")
    sys.stdout.flush()


def main(**arguments: Any) -> dict[str, Any]:
    """What an entrypoint that only names this module calls."""
    say({"main": arguments})
    return {"main": arguments}


def tell(**arguments: Any) -> dict[str, Any]:
    """Tell the keyword arguments."""
    say(arguments)
    return arguments


def identify(names: Sequence[str], seconds: float = 0.0) -> dict[str, str | None]:
    """Tell variables of the environment, then sleep."""
    found = {name: os.environ.get(name) for name in names}
    say(found)
    time.sleep(seconds)
    return found


def fingerprint(name: str) -> None:
    """Tell the SHA-256 of a variable's value, which may be a secret."""
    say(hashlib.sha256(os.environ.get(name, "").encode()).hexdigest())


def count(lines: int, seconds: float = 0.0) -> None:
    """Write numbered lines to stdout, then sleep, then write one line to stderr."""
    for number in range(lines):
        sys.stdout.write(f"line {number}\n")
    sys.stdout.flush()
    time.sleep(seconds)
    sys.stderr.write("to stderr\n")
    sys.stderr.flush()


def sleep(seconds: float = 600.0) -> str:
    """Say so, and sleep."""
    say("asleep")
    time.sleep(seconds)
    return "slept"


def fail(message: str) -> None:
    """Raise."""
    raise ValueError(message)


def fail_on_rank(rank: int) -> str:
    """Raise in one replica only."""
    if os.environ["REPLICA_RANK"] == str(rank):
        raise RuntimeError("this replica is the bad one")
    return "good"


def leave(code: int) -> None:
    """End the process with an exit code."""
    sys.exit(code)


def kill_self(signum: int) -> None:
    """Die of a signal."""
    os.kill(os.getpid(), signum)
