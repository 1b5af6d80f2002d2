"""SIGTERM, noted at once, whatever the main thread is doing."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

EXIT_CODE = 128 + signal.SIGTERM
_ARRIVED, _HANDLED, _WAKE = bytes([signal.SIGTERM]), b"\x00", b"\xff"


class Sigterm:
    """Counts SIGTERMs for a thread that watches; a context manager for the main thread.

    Python runs a signal's handler in the main thread, between two bytecodes: not while that thread
    is in a kernel, a copy or a transfer of many seconds. The C handler below it writes a byte to a
    pipe at once, and that is what is counted. Should other code of the process take that away (an
    event loop may), the Python handler's own bytes are.

    Args:
        in_main_thread: called there for each signal, and may raise.
    """

    def __init__(self, in_main_thread: Callable[[], None]) -> None:
        self._in_main_thread = in_main_thread
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._poll = select.poll()
        self._poll.register(self._reader, select.POLLIN)
        self._arrived = self._handled = self._own = 0
        self._previous: Any = None

    @property
    def count(self) -> int:
        """SIGTERMs from outside that :meth:`wait` has seen."""
        return max(self._arrived, self._handled) - self._own

    def __enter__(self) -> Sigterm:
        global _installed
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        other = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if other != -1:  # somebody else's, who needs it more
            signal.set_wakeup_fd(other)
        _installed = self
        return self

    def __exit__(self, *_exc: object) -> None:
        """Leave SIGTERM as it was; nobody watches any more."""
        global _installed
        _installed = None
        other = signal.set_wakeup_fd(-1)
        if other != self._writer:
            signal.set_wakeup_fd(other)
        signal.signal(signal.SIGTERM, self._previous)
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, timeout_s: float) -> None:
        """Wait for a signal or a :meth:`wake`; for the watching thread only."""
        # Rounded up, not to ask again and again in the last millisecond. A day is as good as ever.
        milliseconds = math.ceil(1000 * min(max(timeout_s, 0.0), 86_400.0))
        if not self._poll.poll(milliseconds):
            return
        data = os.read(self._reader, 4096)
        self._arrived += data.count(_ARRIVED)  # other signals write their numbers, too
        self._handled += data.count(_HANDLED)

    def wake(self) -> None:
        """End a :meth:`wait`. May be called from any thread, and from a signal handler."""
        self._write(_WAKE)

    def interrupt(self) -> None:
        """Have ``in_main_thread`` called soon, even if that thread is in a system call."""
        if signal.getsignal(signal.SIGTERM) == self._handle:
            self._own += 1
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGTERM)

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        self._write(_HANDLED)
        self._in_main_thread()

    def _write(self, byte: bytes) -> None:
        with contextlib.suppress(BlockingIOError):  # full of what nobody has read yet
            os.write(self._writer, byte)


# A worker that a trainer forks inherits the handler and the pipe: to end it must not be taken for
# the end of the replica. SIGTERM is held back in the thread that forks until this is put right, so
# that none is lost, or counted in the wrong process.

_installed: Sigterm | None = None
_masks = threading.local()


def _before_fork() -> None:
    if _installed is not None:
        _masks.saved = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork_in_parent() -> None:
    saved = _masks.__dict__.pop("saved", None)
    if saved is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, saved)


def _after_fork_in_child() -> None:
    global _installed
    if _installed is not None:
        _installed = None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _after_fork_in_parent()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
