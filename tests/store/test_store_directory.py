"""What is particular to the directory driver."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diloco_cloud.errors import (
    DeniedError,
    NotFoundError,
    StoreError,
    UnreachableError,
    UnsupportedStoreError,
)
from diloco_cloud.store import open_store, probe_store
from diloco_cloud.store.directory import DirectoryStore
from diloco_cloud.store.os_errors import store_error

RACER = """
import pathlib, sys, time
from diloco_cloud.errors import AlreadyExistsError
from diloco_cloud.store import open_store
store, me, go = open_store(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
print("ready", flush=True)
while not go.exists():
    time.sleep(0.001)
for race in range(100):
    try:
        store.create(f"race/{race:03d}", me.encode())
        print(race, flush=True)
    except AlreadyExistsError:
        pass
"""

STOPPED_WRITER = """
import os, sys, time
from diloco_cloud.store import open_store
def stop(descriptor):
    print("written, not yet named", flush=True)
    time.sleep(60)
os.fsync = stop
open_store(sys.argv[1]).put("folder/k", b"x" * 1000)
"""


def test_directory_create_has_one_winner_across_processes(tmp_path: Path) -> None:
    root, go = tmp_path / "store", tmp_path / "go"
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(root), str(me), str(go)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for me in range(4)
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        go.touch()
        won = {me: racer.communicate(timeout=60)[0].split() for me, racer in enumerate(racers)}
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    assert sorted(int(race) for races in won.values() for race in races) == list(range(100))
    store = open_store(root)
    for me, races in won.items():
        assert all(store.get(f"race/{int(race):03d}") == f"{me}".encode() for race in races)


def test_directory_writer_killed_half_way_leaves_nothing_to_see(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", STOPPED_WRITER, str(tmp_path)], stdout=subprocess.PIPE
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written, not yet named\n"
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=10)
    store = open_store(tmp_path)
    assert len(list((tmp_path / ".diloco-tmp").iterdir())) == 1
    assert store.list() == []
    assert store.list_dirs() == []


def test_directory_stale_temporary_files_are_hidden_then_swept(tmp_path: Path) -> None:
    open_store(tmp_path).put("k", b"1")
    scratch = tmp_path / ".diloco-tmp"
    old, new = scratch / "old", scratch / "new"
    for file in (old, new):
        file.write_bytes(b"left by a killed writer")
    two_days_ago = time.time() - 2 * 86_400
    os.utime(old, (two_days_ago, two_days_ago))
    store = open_store(tmp_path)
    assert [info.key for info in store.list()] == ["k"]
    assert store.list_dirs() == []
    store.put("k", b"2")
    assert not old.exists()
    assert new.exists()


def test_directory_reserves_its_own_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reserved"):
        open_store(tmp_path).put(".diloco-tmp/k", b"")


def test_directory_removes_empty_folders_but_not_its_root(tmp_path: Path) -> None:
    store = open_store(tmp_path / "root")
    store.put("a/b/c/d", b"")
    store.put("a/k", b"")
    store.delete("a/b/c/d")
    assert sorted(p.name for p in (tmp_path / "root" / "a").iterdir()) == ["k"]
    store.delete("a/k")
    assert (tmp_path / "root").is_dir()


def test_directory_emptied_child_leaves_nothing_behind(tmp_path: Path) -> None:
    open_store(tmp_path / "run-1").put("alive/0", b"")  # a replica opens the run's own prefix
    assert (tmp_path / "run-1" / ".diloco-tmp").is_dir()
    store = open_store(tmp_path)
    child = store.child("run-1")
    child.put("run.json", b"")
    child.delete_many(info.key for info in child.list())
    assert store.list_dirs() == []
    assert not (tmp_path / "run-1").exists()
    child.create("run.json", b"again")
    assert child.get("run.json") == b"again"


def test_directory_scratch_folder_in_use_is_not_removed(tmp_path: Path) -> None:
    open_store(tmp_path / "run-1").put("k", b"")
    (tmp_path / "run-1" / ".diloco-tmp" / "being-written").touch()
    open_store(tmp_path).delete("run-1/k")
    assert (tmp_path / "run-1" / ".diloco-tmp" / "being-written").exists()


def test_directory_survives_removal_of_everything(tmp_path: Path) -> None:
    import shutil

    store = open_store(tmp_path / "root")
    store.put("a/k", b"1")
    shutil.rmtree(tmp_path / "root")
    store.create("a/k", b"2")
    assert store.get("a/k") == b"2"


def test_directory_that_does_not_exist_is_an_empty_store(tmp_path: Path) -> None:
    store = open_store(tmp_path / "no" / "such")
    assert store.list() == []
    assert store.list_dirs() == []
    with pytest.raises(NotFoundError):
        store.get("k")
    assert not (tmp_path / "no").exists()


def test_directory_key_cannot_be_below_an_object(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put("a", b"")
    for write in (store.put, store.create):
        with pytest.raises(StoreError, match="prefix of another"):
            write("a/b", b"")
    store.put("d/k", b"")
    for write in (store.put, store.create):
        with pytest.raises(StoreError, match="prefix of another"):
            write("d", b"")


def test_directory_whose_root_is_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for uri in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="is not a directory"):
            probe_store(open_store(uri))


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a place nobody may write to")
def test_directory_that_may_not_be_written_is_denied() -> None:
    with pytest.raises(DeniedError) as caught:
        probe_store(open_store("/sys/diloco-cloud"))
    assert isinstance(caught.value, PermissionError)
    assert "/sys/diloco-cloud: " in str(caught.value)
    assert ".diloco-" not in str(caught.value)
    assert caught.value.fix is not None


def test_directory_without_hard_links_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_link)
    with pytest.raises(UnsupportedStoreError, match="no hard links"):
        probe_store(open_store(tmp_path))
    assert open_store(tmp_path).list() == []


def test_directory_link_whose_reply_was_lost_is_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def link_twice(source: Path, target: Path) -> None:  # what an NFS client may do
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    open_store(tmp_path).create("k", b"1")
    assert open_store(tmp_path).get("k") == b"1"


def test_directory_uri_is_independent_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = open_store("runs of today/ü%41")
    store.put("k", b"1")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert store.uri.startswith("file:///")
    assert open_store(store.uri).get("k") == b"1"
    assert store.get("k") == b"1"


def test_directory_without_fsync_works_the_same(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, fsync=False).child("c")
    store.create("k", b"1")
    assert store.get("k") == b"1"


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (errno.ENOSPC, StoreError, "no space left"),
        (errno.EDQUOT, StoreError, "no space left"),
        (errno.EROFS, DeniedError, "read-only"),
        (errno.EACCES, DeniedError, "no access"),
        (errno.ENOENT, NotFoundError, "does not exist"),
        (errno.ENOTDIR, NotFoundError, "does not exist"),
        (errno.EIO, UnreachableError, "cannot be reached"),
        (errno.ESTALE, UnreachableError, "cannot be reached"),
        (errno.ETIMEDOUT, UnreachableError, "cannot be reached"),
        (errno.ENAMETOOLONG, StoreError, "too long"),
    ],
)
def test_os_errors_become_store_errors(code: int, kind: type[StoreError], says: str) -> None:
    error = store_error(OSError(code, os.strerror(code)), "/data/k")
    assert type(error) is kind
    assert says in str(error)
    assert "/data/k" in str(error)
