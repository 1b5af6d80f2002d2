"""What runs in a Modal container: one replica, in a child process.

Modal starts a container that crashes again and again, on a bill; a child that crashes is a result.
So the process that Modal knows imports next to nothing, allocates nothing, and outlives its child:

======================================  ============================================================
the replica ends, well or not           its exit code is returned: no retry, a supervisor decides
its time slice is over                  SIGTERM; then, if there is another slice, ``TimeSliceOver``
                                        is raised, which Modal answers with a retry
Modal takes the machine (SIGINT)        SIGTERM; the exception goes on to Modal, which starts the
                                        same call again elsewhere
the call is cancelled (SIGUSR1)         SIGTERM; the exception goes on, and the call is terminated
======================================  ============================================================

The standard library only, and no SDK: a function of the user's own may call :func:`run_replica`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from diloco_cloud.executors.modal import child as child_module
from diloco_cloud.executors.modal.logs import announcement

#: Tells a result of ours from whatever another function returns.
RESULT_KEY: Final = "diloco_replica"
#: Seconds from SIGTERM to SIGKILL: a little less than Modal gives between SIGINT and its own.
_GRACE_S: Final = 28.0
#: To whom the kernel turns first when memory runs out, on a scale to 1000.
_OOM_SCORE: Final = "1000"


class TimeSliceOver(RuntimeError):
    """A replica has used up its time in one container, and is to go on in another."""


def run_replica(rank: int, job: Mapping[str, Any]) -> dict[str, Any]:
    """Run one replica to the end of its process.

    Args:
        rank: of the replica.
        job: what Modal was given: what to call, with what, in what environment, for how long.

    Returns:
        ``diloco_replica`` (the rank), ``exit_code`` (negative for a signal), ``reason``, ``error``
        and ``result``, all JSON values.

    Raises:
        TimeSliceOver: it has run for its ``limit_s``, and Modal is to start it again.
        BaseException: what Modal raises here to end this process early.
    """
    with tempfile.TemporaryDirectory(prefix="replica-") as directory:
        Path(directory, "job.json").write_text(json.dumps({**job, "sys_path": sys.path}))
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **job["environment"]}
        _announce(rank, environment)
        code, timed_out = _run(_argv(job, directory), environment, float(job["limit_s"]))
        outcome = _outcome(directory)
    stopped = timed_out and code != 0
    if stopped and job["resumes"]:
        raise TimeSliceOver(f"replica {rank} goes on in another container")
    return {
        RESULT_KEY: rank,
        "exit_code": code,
        "reason": "timeout" if stopped else outcome.get("reason"),
        "error": "ran past its timeout and was stopped" if stopped else outcome.get("error"),
        "result": outcome.get("result"),
    }


def _announce(rank: int, environment: Mapping[str, str]) -> None:
    """Say which replica this call is: Modal tells nobody what a call was given."""
    attempt = environment.get("DILOCO_ATTEMPT", "0")
    sys.stdout.write(f"{announcement(rank, attempt)}\n")
    sys.stdout.flush()


def _argv(job: Mapping[str, Any], directory: str) -> list[str]:
    if "script" in job:
        places = [Path(entry or ".", job["script"]) for entry in sys.path]
        path = next((str(place) for place in places if place.is_file()), job["script"])
        return [sys.executable, path, *job["args"]]
    return [sys.executable, "-P", child_module.__file__, directory]


def _run(argv: list[str], environment: Mapping[str, str], limit_s: float) -> tuple[int, bool]:
    """The exit code of a process, and whether it was made to end by the time limit."""
    deadline = time.monotonic() + limit_s
    # A group of its own: what interrupts this process is passed on as the SIGTERM replicas expect.
    replica = subprocess.Popen(argv, env=environment, process_group=0)
    try:
        with contextlib.suppress(OSError):
            Path(f"/proc/{replica.pid}/oom_score_adj").write_text(_OOM_SCORE)
        try:
            return replica.wait(max(0.0, deadline - time.monotonic())), False
        except subprocess.TimeoutExpired:
            return _stop(replica), True
    except BaseException:
        _stop(replica)
        raise
    finally:
        # Whatever it has left behind must not keep the container, or its GPU.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(replica.pid, signal.SIGKILL)


def _stop(replica: subprocess.Popen[bytes]) -> int:
    """SIGTERM, then SIGKILL after the grace; the exit code."""
    replica.terminate()
    try:
        return replica.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        replica.kill()
        return replica.wait()


def _outcome(directory: str) -> dict[str, Any]:
    """What the child has written about its end; {} if it could not."""
    try:
        outcome: dict[str, Any] = json.loads(Path(directory, "outcome.json").read_text())
    except (OSError, ValueError):
        return {}
    return outcome
