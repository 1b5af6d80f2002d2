"""Waiting for replicas, by an injected clock; and reading their logs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from local_processes import PATIENCE, wait_until

from diloco_cloud.executors.local import LocalProcessExecutor, logs


class Clock:
    """A clock that only sleeping advances."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def test_collect_of_nothing_is_nothing(local: LocalProcessExecutor) -> None:
    assert local.collect([]) == []


@pytest.mark.parametrize("timeout", [60, 600, 3600, 24 * 3600])
def test_collect_honours_its_timeout(
    local: LocalProcessExecutor, state_dir: Path, timeout: int
) -> None:
    clock = Clock()
    patient = LocalProcessExecutor(state_dir=state_dir, clock=clock.time, sleep=clock.sleep)
    handles = local.launch_replicas(2, "replica_programs:sleep", {})
    local.cancel(handles[0])
    local.collect(handles[:1], timeout=PATIENCE)
    ended, running = patient.collect(handles, timeout=timeout)
    assert clock.now == pytest.approx(1000.0 + timeout)
    assert ended["status"] == "cancelled"
    assert (running["status"], running["exit_code"], running["result"]) == ("running", None, None)
    assert running["error"].startswith(f"still running after {timeout} seconds; it goes on")
    assert local.poll(handles[1]) == "running"


def test_collect_looks_often_at_first_and_then_every_second(
    local: LocalProcessExecutor, state_dir: Path
) -> None:
    clock = Clock()
    patient = LocalProcessExecutor(state_dir=state_dir, clock=clock.time, sleep=clock.sleep)
    patient.collect(local.launch_replicas(1, "replica_programs:sleep", {}), timeout=60)
    assert clock.sleeps[0] == 0.01
    assert max(clock.sleeps) == 1.0
    assert all(b <= 1.5 * a + 1e-9 for a, b in itertools.pairwise(clock.sleeps))


def test_collect_without_time_looks_once(local: LocalProcessExecutor) -> None:
    handles = local.launch_replicas(1, "replica_programs:sleep", {})
    assert local.collect(handles, timeout=0)[0]["status"] == "running"


def test_collect_keeps_the_order_of_its_handles(local: LocalProcessExecutor) -> None:
    handles = local.launch_replicas(3, "replica_programs:main", {})
    results = local.collect(handles[::-1], timeout=PATIENCE)
    assert [result["rank"] for result in results] == [2, 1, 0]


def test_unreadable_result_is_an_error_of_that_replica_only(local: LocalProcessExecutor) -> None:
    from replica_programs import rank_as_tuple

    handles = local.launch_replicas(2, rank_as_tuple, {})
    local.collect(handles, timeout=PATIENCE)
    Path(handles[0].metadata["directory"], "result.pickle").write_bytes(b"not a pickle")
    broken, whole = local.collect(handles, timeout=PATIENCE)
    assert broken["status"] == "succeeded"
    assert broken["error"].startswith("its result cannot be read: ")
    assert whole["result"] == ("rank", 1)


def test_unreadable_record_is_unknown(local: LocalProcessExecutor) -> None:
    (handle,) = local.launch_replicas(1, "replica_programs", {})
    local.collect([handle], timeout=PATIENCE)
    Path(handle.metadata["directory"], "exit.json").write_text("{")
    assert local.poll(handle) == "unknown"


def test_logs_are_there_while_the_replica_runs(local: LocalProcessExecutor, tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"
    handles = local.launch_replicas(
        2, "replica_programs:speak_then_wait", {"path": str(go_on), "lines": 5}
    )
    wait_until(lambda: local.stream_logs(handles[1]).count("\n") == 5)
    assert local.stream_logs(handles[1], n_lines=2) == "1: line 3\n1: line 4\n"
    data, offset = local.read_logs(handles[1])
    assert data.startswith(b"1: line 0\n")
    assert local.read_logs(handles[1], offset) == (b"", offset)
    go_on.touch()
    local.collect(handles, timeout=PATIENCE)
    assert local.read_logs(handles[1], offset)[0] == b"1: to stderr\n"
    assert local.stream_logs(handles[0], n_lines=1) == "0: to stderr\n"


@pytest.mark.parametrize("n_lines", [0, 1, 2, 3, 7, 9999, 10_000, 20_000])
@pytest.mark.parametrize("ending", ["", "\n"])
def test_tail_equals_the_end_of_the_whole_file(tmp_path: Path, n_lines: int, ending: str) -> None:
    lines = [f"{number} {'ä' * (number % 50)}\n" for number in range(10_000)]
    text = "".join(lines).removesuffix("\n") + ending
    path = tmp_path / "log.txt"
    path.write_text(text)
    expected = "".join(text.splitlines(keepends=True)[-n_lines:]) if n_lines else ""
    assert logs.tail(path, n_lines) == expected


def test_tail_of_one_endless_line_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    assert len(logs.tail(path, 3)) == 1 << 24


def test_tail_of_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"caf\xe9\nna\xefve\n")
    assert logs.tail(path, 1) == "na�ve\n"


def test_missing_log_is_empty(tmp_path: Path) -> None:
    assert logs.tail(tmp_path / "log.txt", 10) == ""
    assert logs.read_from(tmp_path / "log.txt", 7) == (b"", 7)
