"""Heaps of a process with many threads, as glibc itself counts them."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys, threading
from diloco_cloud.replica.heaps import share_heaps

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


def heaps(how: str) -> int:
    command = [sys.executable, "-c", PROGRAM, how]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return output.count("<heap nr=")


@pytest.mark.skipif(sys.platform != "linux", reason="about glibc's heaps")
def test_threads_share_two_heaps() -> None:
    if heaps("each its own") < 3:
        pytest.skip("this C library gives threads no heaps of their own")
    assert heaps("shared") <= 2
