"""Stands by one task of the fake Slurm, as slurmstepd does: queues it, runs it, ends it.

Executed by path: ``slurm_step.py ARRAY TASK``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from slurm_state import (
    ENDED,
    Task,
    change,
    load,
    locked,
    login_environment,
    path_of,
    save,
    settings,
)


def step(array: str, task: int) -> None:
    """Queue, run, requeue and end one task."""
    how = settings()
    begin = time.monotonic() + how["queue_s"]
    while True:
        if not wait_in_queue(array, task, begin):
            return
        if run(array, task) != "requeue":
            return
        begin = time.monotonic() + settings()["requeue_s"]


def wait_in_queue(array: str, task: int, begin: float) -> bool:
    while time.monotonic() < begin:
        found = load(path_of(array, task))
        if found is None:
            return False
        if found["wish"] == "cancel":
            change(array, task, state="CANCELLED", wish=None)
            return False
        time.sleep(0.02)
    return True


def run(array: str, task: int) -> str | None:
    """One life of a task; what was wished of it."""
    with locked():
        found = load(path_of(array, task))
        if found is None:
            return None
        if found["wish"] == "cancel":
            save({**found, "state": "CANCELLED", "wish": None})
            return None
        found.update(state="RUNNING", reason="None", node="vm", wish=None)
        save(found)
    child = start(found)
    deadline = time.monotonic() + found["limit_s"]
    wish, kill_at = None, float("inf")
    while child.poll() is None:
        now = time.monotonic()
        asked = (load(path_of(array, task)) or {"wish": "cancel"})["wish"]
        if wish is None and (asked or now > deadline):
            wish = asked or "TIMEOUT"
            kill_at = now + settings()["kill_wait"] if wish not in ENDED or asked is None else now
            if kill_at > now:
                note(found, wish)
                change(array, task, state="COMPLETING")
                signal_group(child, signal.SIGCONT)
                signal_group(child, signal.SIGTERM)
        if now >= kill_at:
            signal_group(child, signal.SIGKILL)
            kill_at = float("inf")
        time.sleep(0.02)
    if wish is not None:  # else what the script leaves behind stays, as on many clusters
        signal_group(child, signal.SIGKILL)
    return settle(found, wish, child.returncode)


def settle(task: Task, wish: str | None, code: int) -> str | None:
    array, rank = task["array"], task["task"]
    status = -code if code < 0 else code << 8
    if wish == "requeue" and task["requeue"]:
        change(
            array,
            rank,
            state="PENDING",
            reason="BeginTime",
            node="",
            wish=None,
            code=0,
            restarts=task["restarts"] + 1,
        )
        return "requeue"
    if wish in (None, "requeue"):
        state = "COMPLETED" if code == 0 else "FAILED"
        reason = "None" if code == 0 else "NonZeroExitCode"
        change(array, rank, state=state, reason=reason, code=status, wish=None)
        return None
    state = "CANCELLED" if wish == "cancel" else wish
    change(array, rank, state=state, reason="None", code=status, wish=None)
    return None


def start(task: Task) -> subprocess.Popen[bytes]:
    environment = {
        **login_environment(),
        "SLURM_ARRAY_JOB_ID": task["array"],
        "SLURM_ARRAY_TASK_ID": str(task["task"]),
        "SLURM_JOB_ID": f"{task['array']}{task['task']}",
        "SLURM_CPUS_ON_NODE": "1",
        # Only of a job that was requeued.
        **({"SLURM_RESTART_COUNT": str(task["restarts"])} if task["restarts"] else {}),
    }
    del environment["FAKE_SLURM"]
    try:
        log = os.open(output_of(task), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError:  # as Slurm: the job fails, and there is no log to say why
        return subprocess.Popen(["false"], process_group=0)
    try:
        return subprocess.Popen(
            [task["script"]],
            cwd=task["cwd"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
        )
    finally:
        os.close(log)


def output_of(task: Task) -> str:
    path: str = task["output"].replace("%%", "%").replace("%a", str(task["task"]))
    return path


def note(task: Task, wish: str) -> None:
    """slurmstepd's line in the log."""
    why = {"requeue": " DUE TO JOB REQUEUE", "TIMEOUT": " DUE TO TIME LIMIT"}.get(wish, "")
    with contextlib.suppress(OSError), open(output_of(task), "a") as log:
        log.write(
            f"slurmstepd-vm: error: *** JOB {task['array']} ON vm CANCELLED AT "
            f"2026-11-20T14:20:28{why} ***\n"
        )


def signal_group(child: subprocess.Popen[bytes], signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signum)


if __name__ == "__main__":
    step(sys.argv[1], int(sys.argv[2]))
