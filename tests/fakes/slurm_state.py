"""What the fake Slurm knows: one file per task, its settings, and the variables of its jobs.

Standard library only: these modules are executed by path, in a clean environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(os.environ["FAKE_SLURM"])
#: How the cluster behaves. ``down``: nothing answers. ``lose_reply``: so many submissions act, and
#: then time out. ``queue_s``: jobs wait so long. ``requeue_s``: requeued ones do.
DEFAULTS: dict[str, Any] = {
    "down": False,
    "lose_reply": 0,
    "queue_s": 0.0,
    "requeue_s": 2.0,
    "kill_wait": 3,
    "partitions": [["long", "7-00:00:00"], ["short", "1:00:00"]],
    "gpus": {"a100": 3},
    "max_array": 1001,
}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
Task = dict[str, Any]


def settings() -> dict[str, Any]:
    return {**DEFAULTS, **json.loads((ROOT / "settings.json").read_text())}


@contextlib.contextmanager
def locked() -> Iterator[None]:
    with (ROOT / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def path_of(array: str, task: str | int) -> Path:
    return ROOT / "tasks" / f"{array}_{task}.json"


def save(task: Task) -> None:
    path = path_of(task["array"], task["task"])
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(task))
    temporary.replace(path)


def load(path: Path) -> Task | None:
    try:
        task: Task = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return task


def tasks() -> list[Task]:
    found = [load(path) for path in (ROOT / "tasks").glob("*.json")]
    return sorted((t for t in found if t), key=lambda t: (int(t["array"]), t["task"]))


def change(array: str, task: int, **values: Any) -> Task | None:
    with locked():
        found = load(path_of(array, task))
        if found is not None:
            found.update(values)
            save(found)
        return found


def selected(words: list[str]) -> list[Task]:
    """Tasks by ``12``, ``12_3`` or ``12_3,13``."""
    wanted = {word for words in words for word in words.split(",")}
    return [t for t in tasks() if {t["array"], f"{t['array']}_{t['task']}"} & wanted]


def login_environment() -> dict[str, str]:
    """What ``--export=NONE`` leaves: a user's login environment."""
    user = pwd.getpwuid(os.getuid())
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {
        "HOME": user.pw_dir,
        "USER": user.pw_name,
        "LOGNAME": user.pw_name,
        "SHELL": "/bin/sh",
        "PATH": path,
        "TMPDIR": "/tmp",
        "ENVIRONMENT": "BATCH",
        "FAKE_SLURM": str(ROOT),
    }
