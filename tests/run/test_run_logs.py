"""The logs of all replicas as one stream."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from manual_clock import Clock
from replica_writer import ReplicaWriter
from scripted_executor import ScriptedExecutor

from diloco_cloud import keys
from diloco_cloud.errors import UsageError
from diloco_cloud.run import Run
from diloco_cloud.run.follow import LAST_LOOKS
from diloco_cloud.run.logs import parse_chunk, render_record

MakeRun = Callable[..., Run]


def _texts(run: Run, **options: object) -> list[tuple[int, str]]:
    return [(line.rank, line.text) for line in run.logs(**options)]  # type: ignore[arg-type]


def _end(scripted: ScriptedExecutor, *ranks: int) -> None:
    for rank in ranks:
        scripted.set(rank, state="succeeded", exit_code=0)


def test_logs_are_merged_in_time_order(make_run: MakeRun) -> None:
    run = make_run()
    first, second = ReplicaWriter(run.store, 0), ReplicaWriter(run.store, 1)
    first.log("a", "c", ts=100.0)
    second.log("b", "d", ts=100.5)
    first.log("e", ts=200.0)
    assert _texts(run) == [(0, "a"), (1, "b"), (0, "c"), (1, "d"), (0, "e")]


def test_logs_tail_since_and_ranks_select(make_run: MakeRun, clock: Clock) -> None:
    run = make_run()
    now = clock.now
    ReplicaWriter(run.store, 0).log("old", "older", ts=now - 3600)
    ReplicaWriter(run.store, 1).log("new", "newer", ts=now - 10)
    assert _texts(run, tail=1) == [(1, "newer")]
    assert _texts(run, since=60) == [(1, "new"), (1, "newer")]
    assert _texts(run, ranks=[0]) == [(0, "old"), (0, "older")]
    assert _texts(run, tail=0) == []
    with pytest.raises(UsageError, match="no replica 5"):
        _texts(run, ranks=[5])


def test_logs_follow_until_poll_says_the_end(
    make_run: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_run()
    first, second = ReplicaWriter(run.store, 0), ReplicaWriter(run.store, 1)
    first.log("one")

    def last_words() -> None:
        second.log("three")
        _end(scripted, 0, 1)

    nothing_new = [lambda: None] * 5  # silence is not the end
    clock.scheduled = [lambda: first.log("two"), *nothing_new, last_words]
    assert [text for _, text in _texts(run, follow=True)] == ["one", "two", "three"]


def test_logs_follow_waits_for_the_last_lines_of_a_life_known_by_its_own_word(
    make_run: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    """Its executor cannot be asked, and the record of its end comes before the end of its log."""
    run = make_run(replicas=1)
    writer = ReplicaWriter(run.store, 0)
    writer.log("training")
    scripted.set(0, state="unknown")

    def end() -> None:
        writer.end()
        writer.beat(state="succeeded", logged=False)

    def last_words() -> None:
        writer.log("finished")
        writer.beat(state="succeeded", logged=True)

    clock.scheduled = [end, lambda: None, lambda: None, last_words]
    assert [text for _, text in _texts(run, follow=True)] == ["training", "finished"]
    assert clock.naps == 4


def test_logs_follow_does_not_wait_for_ever_for_a_life_killed_before_its_last_lines(
    make_run: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_run(replicas=1)
    writer = ReplicaWriter(run.store, 0)
    writer.log("training")
    writer.beat(logged=False)
    writer.end()
    _end(scripted, 0)
    assert _texts(run, follow=True) == [(0, "training")]
    assert clock.naps == LAST_LOOKS


def test_logs_follow_goes_on_into_the_next_life(
    make_run: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_run(replicas=2)
    ReplicaWriter(run.store, 0).log("first life")
    scripted.set(0, state="failed", exit_code=1)

    def second_life() -> None:
        run.resume()
        ReplicaWriter(run.store, 0, attempt=1).log("second life", ts=2000.0)

    clock.scheduled = [
        second_life,
        lambda: scripted.set(0, attempt=1, state="succeeded"),
        lambda: _end(scripted, 1),
    ]
    lines = [line for line in run.logs(follow=True) if line.rank == 0]
    assert [(line.attempt, line.text) for line in lines] == [(0, "first life"), (1, "second life")]


def test_logs_of_a_replica_that_never_logged_come_from_the_backend(
    make_run: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_run()
    ReplicaWriter(run.store, 0).log("hello")
    scripted.set(0, output="not shown: its log is in the prefix")
    scripted.set(1, output="Segmentation fault\n")
    assert _texts(run) == [(0, "hello"), (1, "Segmentation fault")]


def test_logs_of_a_crash_show_native_output_without_repeating_records(
    make_run: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_run(replicas=1)
    ReplicaWriter(run.store, 0).log("training")
    output = '{"ts": 1000.0, "message": "training"}\nFatal Python error: Aborted'
    scripted.set(0, state="failed", exit_code=-6, output=output)
    assert _texts(run) == [(0, "training"), (0, "Fatal Python error: Aborted")]


def test_logs_fall_back_to_the_last_words_traceback(
    make_run: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_run(replicas=1)
    ReplicaWriter(run.store, 0).end("failed", traceback="Traceback\nValueError: boom\n")
    scripted.set(0, state="failed", exit_code=1)
    assert _texts(run) == [(0, "Traceback"), (0, "ValueError: boom")]


def test_logs_read_each_chunk_once_when_following(
    make_run: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_run(replicas=1)
    writer = ReplicaWriter(run.store, 0)
    for _ in range(20):
        writer.log("x")
    reads: list[str] = []
    get = run.store.get

    def counted(key: str) -> bytes:
        reads.append(key)
        return get(key)

    run.store.get = counted  # type: ignore[method-assign]
    clock.scheduled = [*[lambda: None] * 10, lambda: _end(scripted, 0)]
    assert len(_texts(run, follow=True)) == 20
    chunks = [key for key in reads if key.startswith(keys.LOGS)]
    assert len(chunks) == 20 + 11  # each chunk, then one look for the next per round


@pytest.mark.parametrize(
    ("record", "lines"),
    [
        ({"ts": 1, "level": "INFO", "message": "round 3 agreed"}, ["round 3 agreed"]),
        ({"ts": 1, "level": "WARNING", "message": "slow"}, ["WARNING slow"]),
        (
            {"ts": 1, "event": "sync", "round": 3, "seconds": 0.123456789},
            ["sync round=3 seconds=0.123457"],
        ),
        ({"ts": 1, "message": "a\nb"}, ["a", "b"]),
        ({"ts": 1, "message": "died", "traceback": "T\nE: x\n"}, ["died", "T", "E: x"]),
    ],
)
def test_render_record_is_readable(record: dict[str, object], lines: list[str]) -> None:
    assert render_record(record) == lines


def test_parse_chunk_keeps_what_is_no_record() -> None:
    raw = b'plain\n{"broken\n{"ts": "2026-01-01T00:00:00+00:00", "message": "m"}\n\xff\n'
    lines = parse_chunk(raw, (3, 1))
    assert [line.text for line in lines] == ["plain", '{"broken', "m", "\ufffd"]
    assert [line.time for line in lines] == [None, None, 1767225600.0, None]
