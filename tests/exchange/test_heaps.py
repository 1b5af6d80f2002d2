"""Heaps of a process, as glibc and Linux count them, and when what they have free is returned."""

from __future__ import annotations

import subprocess
import sys

import pytest

from diloco_cloud.exchange.heaps import FreedMemory

MB = 2**20

PROGRAM = """
import ctypes, sys, threading
from diloco_cloud.exchange.heaps import share_heaps

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.fdopen.restype = ctypes.c_void_p
if sys.argv[1] == "shared":
    share_heaps()
together = threading.Barrier(8)

def use_memory():
    together.wait()
    assert libc.malloc(1000)
    together.wait()

threads = [threading.Thread(target=use_memory) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
stream = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, stream)
libc.fflush(stream)
"""

#: Frees 64 MiB in blocks below one that stays, and prints how much is in memory before and after.
FREEING = """
import ctypes
from diloco_cloud.exchange.heaps import give_back, resident

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
blocks = [libc.malloc(2**16) for _ in range(1024)]
for block in blocks:
    ctypes.memset(block, 1, 2**16)
for block in blocks[:-1]:
    libc.free(ctypes.c_void_p(block))
before = resident()
give_back()
print(before, resident())
"""


def heaps(how: str) -> int:
    command = [sys.executable, "-c", PROGRAM, how]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return output.count("<heap nr=")


@pytest.mark.skipif(sys.platform != "linux", reason="about glibc's heaps")
def test_threads_share_two_heaps() -> None:
    if heaps("each its own") < 3:
        pytest.skip("this C library gives threads no heaps of their own")
    assert heaps("shared") <= 2


@pytest.mark.skipif(sys.platform != "linux", reason="about glibc's heaps")
def test_what_is_free_is_returned() -> None:
    command = [sys.executable, "-c", FREEING]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    before, after = map(int, output.split())
    assert before - after > 48 * MB


class Process:
    """Memory that is set by hand."""

    def __init__(self) -> None:
        self.used, self.free, self.returned = 100 * MB, 0, 0

    def resident(self) -> int:
        return self.used + self.free

    def give_back(self) -> None:
        self.free = 0
        self.returned += 1


def test_freed_memory_is_returned_when_much_has_piled_up() -> None:
    process = Process()
    freed = FreedMemory(800 * MB, process.resident, process.give_back)
    process.free = 100 * MB
    freed.check()
    assert process.returned == 0
    process.free += 1
    freed.check()
    assert (process.returned, process.free) == (1, 0)


def test_memory_in_use_is_not_asked_for_again_and_again() -> None:
    process = Process()
    freed = FreedMemory(800 * MB, process.resident, process.give_back)
    process.used += 101 * MB  # a model that is being trained beside
    for _ in range(5):
        freed.check()
    assert process.returned == 1
    process.used -= 101 * MB
    freed.check()
    process.free = 101 * MB
    freed.check()
    assert process.returned == 2


def test_little_memory_is_left_where_it_is() -> None:
    process = Process()
    freed = FreedMemory(8 * MB, process.resident, process.give_back)
    process.free = 16 * MB
    freed.check()
    assert process.returned == 0
