"""Folders that are made once: by one of many, and whole even if their maker is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diloco_cloud.trainers.folder_cache import folder_once

#: Dies by SIGKILL with half of the folder written.
KILLED = """
import os, pathlib, signal, sys
from diloco_cloud.trainers.folder_cache import folder_once
def fill(folder):
    (folder / "first").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
folder_once(pathlib.Path(sys.argv[1]), "model", fill)
"""


def fill(folder: Path) -> None:
    for name in ("first", "second"):
        (folder / name).write_text(name)


def contents(parent: Path) -> set[str]:
    return {str(path.relative_to(parent)) for path in parent.rglob("*")}


WHOLE = {"model", "model/first", "model/second", "model.lock"}


def test_folder_once_is_filled_by_one_of_many(tmp_path: Path) -> None:
    filled = []

    def count(folder: Path) -> None:
        filled.append(folder)
        fill(folder)

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: folder_once(tmp_path / "c", "model", count), range(8)))
    assert set(made) == {tmp_path / "c" / "model"}
    assert len(filled) == 1
    assert contents(tmp_path / "c") == WHOLE


def test_folder_once_after_a_kill_is_made_anew_and_leaves_no_rubbish(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "model").exists()
    assert len(contents(tmp_path)) == 3  # the lock, the half-made folder and its file
    folder_once(tmp_path, "model", fill)
    assert contents(tmp_path) == WHOLE


def test_folder_once_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        fill(folder)
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        folder_once(tmp_path, "model", fail)
    assert contents(tmp_path) == {"model.lock"}


def test_folder_once_without_locks_keeps_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    def late(folder: Path) -> None:
        fill(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").rename(tmp_path / "model")
        (folder / "first").write_text("another")

    monkeypatch.setattr("fcntl.flock", refuse)
    (tmp_path / "elsewhere").mkdir()
    assert (folder_once(tmp_path, "model", late) / "first").read_text() == "first"
    assert contents(tmp_path) == WHOLE
