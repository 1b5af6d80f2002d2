"""Shipping a replica's log to the prefix."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import uuid

import pytest

from diloco_cloud.errors import UnreachableError
from diloco_cloud.replica.lines import JsonLines, LineStream
from diloco_cloud.replica.logs import PrintLogger, ReplicaLogging
from diloco_cloud.replica.shipper import LogShipper
from diloco_cloud.store import open_store
from diloco_cloud.store.base import Data
from diloco_cloud.store.memory import MemoryStore


class FlakyStore(MemoryStore):
    """A store whose writes fail while ``down``."""

    down = False

    def put(self, key: str, data: Data) -> None:
        if self.down:
            raise UnreachableError("the store is away")
        super().put(key, data)


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("n", logging.INFO, "", 0, message, (), None)


def test_lines_survive_a_store_that_is_away() -> None:
    store = FlakyStore("flaky")
    shipper = LogShipper(store, 1, 0)
    shipper.handle(record("one"))
    store.down = True
    shipper.ship()
    shipper.handle(record("two"))
    store.down = False
    shipper.ship()
    shipper.ship()
    chunks = [i.key for i in store.list("logs/")]
    assert chunks == [f"logs/0001.0000/0000000{number}.jsonl" for number in (0, 1)]
    assert [store.get(key) for key in chunks] == [b"one\n", b"two\n"]


def test_chunks_are_numbered_without_gaps() -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    shipper = LogShipper(store, 0, 2)
    for message in ("a", "b", "c"):
        shipper.handle(record(message))
        shipper.ship()
    assert [i.key[-14:] for i in store.list("logs/0000.0002/")] == [
        f"{n:08d}.jsonl" for n in range(3)
    ]


def test_much_output_asks_to_be_shipped_early() -> None:
    shipper = LogShipper(open_store("memory://early"), 0, 0)
    shipper.handle(record("x" * 300_000))
    assert shipper.full.is_set()


@pytest.mark.parametrize(
    ("written", "logged"),
    [
        (["a\n", "b\n"], ["a", "b"]),
        (["a", "b\nc"], ["ab"]),
        ([" 1%\r 50%\r100%\n"], ["100%"]),
        (["\n", "  \n"], []),
    ],
)
def test_printed_text_becomes_whole_lines(
    written: list[str], logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    stream = PrintLogger(logging.getLogger("printed"), logging.INFO, io.StringIO())
    with caplog.at_level(logging.INFO, "printed"):
        for text in written:
            assert stream.write(text) == len(text)
    assert caplog.messages == logged


def test_print_stand_in_keeps_the_descriptor_of_the_stream(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert PrintLogger(logging.getLogger(), 0, sys.stdout).fileno() == sys.stdout.fileno()


def test_what_is_kept_while_the_store_is_away_is_bounded_and_the_loss_told() -> None:
    store = FlakyStore("bounded")
    store.down = True
    shipper = LogShipper(store, 0, 0, keep=10)
    shipper.setFormatter(logging.Formatter("%(message)s"))
    for message in ("one", "two", "three", "four"):
        shipper.handle(record(message))
        shipper.ship()
    store.down = False
    shipper.ship()
    assert store.get("logs/0000.0000/00000000.jsonl") == b"one\n"
    assert store.get("logs/0000.0000/00000001.jsonl").decode().splitlines() == [
        "1 lines were dropped here while the store was away",
        "three",
        "four",
    ]
    shipper.handle(record("five"))
    shipper.ship()
    assert store.get("logs/0000.0000/00000002.jsonl") == b"five\n"


def test_lines_logged_while_a_shipment_fails_are_kept_in_order() -> None:
    class Meanwhile(FlakyStore):
        def put(self, key: str, data: Data) -> None:
            if self.down:
                writer = threading.Thread(target=shipper.handle, args=(record("meanwhile"),))
                writer.start()
                writer.join()
            super().put(key, data)

    store = Meanwhile("meanwhile")
    shipper = LogShipper(store, 0, 0)
    shipper.handle(record("before"))
    store.down = True
    shipper.ship()
    store.down = False
    shipper.handle(record("after"))
    shipper.ship()
    assert store.get("logs/0000.0000/00000000.jsonl") == b"before\n"
    assert store.get("logs/0000.0000/00000001.jsonl") == b"meanwhile\nafter\n"


def test_chunk_that_was_stored_though_its_request_failed_is_never_changed() -> None:
    """Whoever follows may have read it, and would not read it again."""

    class LostReply(FlakyStore):
        def put(self, key: str, data: Data) -> None:
            MemoryStore.put(self, key, data)
            super().put(key, data)

    store = LostReply("lost-reply")
    shipper = LogShipper(store, 0, 0)
    shipper.handle(record("one"))
    store.down = True
    assert not shipper.ship()
    read = store.get("logs/0000.0000/00000000.jsonl")
    shipper.handle(record("two"))
    store.down = False
    assert shipper.ship()
    assert store.get("logs/0000.0000/00000000.jsonl") == read == b"one\n"
    assert store.get("logs/0000.0000/00000001.jsonl") == b"two\n"


def test_shipment_stuck_in_another_thread_is_not_waited_for() -> None:
    stuck, go = threading.Event(), threading.Event()

    class Stuck(MemoryStore):
        def put(self, key: str, data: Data) -> None:
            stuck.set()
            assert go.wait(60)
            super().put(key, data)

    store = Stuck("stuck")
    shipper = LogShipper(store, 0, 0)
    shipper.handle(record("one"))
    thread = threading.Thread(target=shipper.ship)
    thread.start()
    assert stuck.wait(10)
    shipper.handle(record("two"))
    shipper.ship(wait_s=0.01)
    go.set()
    thread.join()
    shipper.ship()
    assert store.get("logs/0000.0000/00000001.jsonl") == b"two\n"


def test_log_call_with_bad_arguments_does_not_raise_and_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, out = MemoryStore("bad-arguments"), io.StringIO()
    shipper, stream = LogShipper(store, 0, 0), LineStream(out)
    monkeypatch.setattr(logging.getLogger("lib"), "propagate", False)  # pytest's handler raises
    monkeypatch.setattr(logging.getLogger("lib"), "handlers", [shipper, stream])
    for handler in (shipper, stream):
        handler.setFormatter(JsonLines(0, 0))
    logging.getLogger("lib").warning("%d steps", "x")
    shipper.ship()
    line = store.get("logs/0000.0000/00000000.jsonl").decode()
    assert json.loads(line)["message"] == "%d steps ('x',)"
    assert out.getvalue() == line


def test_record_that_cannot_be_formatted_at_all_does_not_raise() -> None:
    shipper = LogShipper(MemoryStore("hopeless"), 0, 0)
    shipper.setFormatter(logging.Formatter("%(no_such_field)s"))
    shipper.handle(record("lost"))


class BrokenStream(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def test_broken_stdout_costs_neither_the_trainer_nor_the_prefix_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", BrokenStream())
    store = MemoryStore("broken")
    with ReplicaLogging(store, 0, 0):
        print("said", flush=True)  # noqa: T201
    (line,) = store.get("logs/0000.0000/00000000.jsonl").decode().splitlines()
    assert json.loads(line)["message"] == "said"


def test_failing_handler_of_a_library_does_not_recurse() -> None:
    foreign = logging.StreamHandler(BrokenStream())  # reports its failures on sys.stderr
    store = MemoryStore("foreign")
    with ReplicaLogging(store, 0, 0):
        logging.getLogger().addHandler(foreign)
        try:
            print("said")  # noqa: T201
        finally:
            logging.getLogger().removeHandler(foreign)
    lines = store.get("logs/0000.0000/00000000.jsonl").decode().splitlines()
    assert json.loads(lines[0])["message"] == "said"
