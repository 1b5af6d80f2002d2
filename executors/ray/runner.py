"""Stands by one replica on a Ray node: gives it its secrets, and ends it at its timeout.

Ray has no time limit for jobs, and no channel for secrets. The job's command is
``python -m diloco_cloud.executors.ray.runner … -- COMMAND``, which

* restores variables that Ray would have changed;
* reads the secrets from a file that only this user can read, and deletes it;
* sends SIGTERM to the replica when its time is up, and SIGKILL after the grace;
* exits as the replica did; 128 + n for a signal, ``TIMED_OUT`` for its time.

When a job is stopped, Ray sends SIGTERM to every process of it, so the replica has got its own and
the runner passes nothing on: a second one would tell the replica not to take its time. When a node
dies, Ray kills the job's process group, which the replica stays in.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Final

from diloco_cloud.executors.ray.states import LITERALS, TIMED_OUT, TIMED_OUT_LINE

#: Exit code without secrets: EX_CONFIG of sysexits.h.
_NO_SECRETS: Final = 78


def main(argv: Sequence[str] | None = None) -> int:
    """Run a replica; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    split = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:split])
    if not words[split + 1 :]:
        parser.error("there is no -- COMMAND")
    environment = dict(os.environ)
    environment |= json.loads(environment.pop(LITERALS, "{}"))
    missing = [name for name in options.expect if name not in environment]
    if missing:
        sys.stderr.write(f"diloco-cloud: this Ray node has no {', '.join(missing)}\n")
        return _NO_SECRETS
    if options.secrets:
        try:
            environment |= _take(options.secrets)
        except OSError as error:
            sys.stderr.write(f"diloco-cloud: the secrets cannot be read: {error}\n")
            return _NO_SECRETS
    signal.signal(signal.SIGTERM, _leave_it_to_the_replica)
    child = subprocess.Popen(words[split + 1 :], env=environment, stdin=subprocess.DEVNULL)
    return _stand_by(child, options.timeout, options.grace)


def _stand_by(child: subprocess.Popen[bytes], timeout: float, grace: float) -> int:
    try:
        code = child.wait(timeout)
    except subprocess.TimeoutExpired:
        child.terminate()
        try:
            child.wait(grace)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        sys.stderr.write(f"{TIMED_OUT_LINE}\n")
        return TIMED_OUT
    return 128 - code if code < 0 else code


def _take(path: str) -> dict[str, str]:
    """Secrets from a file, which is then gone."""
    with open(path, encoding="utf-8") as file:
        secrets: dict[str, str] = json.load(file)
    os.unlink(path)
    return secrets


def _leave_it_to_the_replica(signum: int, frame: FrameType | None) -> None:
    pass


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m diloco_cloud.executors.ray.runner")
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--secrets", metavar="FILE")
    parser.add_argument("--expect", metavar="VARIABLE", action="append", default=[])
    return parser


if __name__ == "__main__":
    sys.exit(main())
