"""Shipping a replica's log to the prefix."""

from __future__ import annotations

import io
import logging
import sys
import uuid

import pytest

from diloco_cloud.errors import UnreachableError
from diloco_cloud.replica.logs import LogShipper, PrintLogger
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
    assert [i.key for i in store.list("logs/")] == ["logs/0001.0000/00000000.jsonl"]
    assert store.get("logs/0001.0000/00000000.jsonl") == b"one\ntwo\n"


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
