"""SIGTERM: the provider, or a user, wants this replica to end."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

EXIT_CODE = 128 + signal.SIGTERM
#: Seconds from SIGTERM to the end of the process. Providers kill after 10 s or more.
EXIT_S = 5.0


class Terminated(SystemExit):
    """SIGTERM arrived. Raised in the main thread, wherever it is."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class Sigterm:
    """Handles SIGTERM for the life of a replica; a context manager.

    The first one ends the work in hand with :class:`Terminated`, or is let pass if that work is
    done: what is left then is short, and should be finished. The second ends the process at once.

    Unwinding takes as long as the trainer's ``finally`` blocks and the store's requests do, so
    nothing waits for it: the last words are said in a thread of their own, and ``exit_s`` after the
    signal the process ends by ``os._exit``. An ordinary exit would join the threads of every
    executor first, and one that is stuck in an upload can be neither cancelled nor abandoned.

    Args:
        exit_s: seconds from the signal to the end of the process, if it has not ended by itself.
    """

    def __init__(self, *, exit_s: float = EXIT_S) -> None:
        self._exit_s = exit_s
        self._pid = os.getpid()
        self._signals = 0
        self._requested = False
        self._over = False
        self._last_words: Callable[[], None] = lambda: None
        self._said = threading.Event()
        # Its put() is reentrant, so the handler may call it. To start a thread is not: the main
        # thread may have been interrupted while it held the lock that takes.
        self._arrived: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="diloco-sigterm", daemon=True)
        self._previous: Any = None

    def __enter__(self) -> Sigterm:
        # Signals reach the main thread only, and only it may say what they do.
        if threading.current_thread() is threading.main_thread():
            self._thread.start()
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._previous is not None and not self._requested:
            signal.signal(signal.SIGTERM, self._previous)
            self._arrived.put(False)
            self._thread.join()

    def interruptible(self, work: Callable[[], T], last_words: Callable[[], None]) -> T:
        """The result of ``work``, unless SIGTERM comes before it returns.

        Args:
            work: called in this thread.
            last_words: called in another thread as soon as the signal comes.

        Raises:
            Terminated: the signal came, whatever became of ``work``: a trainer may have caught the
                exception, or raised another one while it unwound.
        """
        self._last_words = last_words
        try:
            return work()
        finally:
            self._over = True
            if self._requested:
                self._said.wait(self._exit_s)
                raise Terminated

    def _on_signal(self, _signal: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # A forked worker of the trainer's: not this replica's end.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._signals += 1
        if self._signals > 1:
            os._exit(EXIT_CODE)
        if not self._over:
            self._requested = True
            self._arrived.put(True)
            raise Terminated

    def _watch(self) -> None:
        if not self._arrived.get():
            return
        threading.Thread(target=self._speak, name="diloco-last-words", daemon=True).start()
        time.sleep(self._exit_s)
        os._exit(EXIT_CODE)

    def _speak(self) -> None:
        try:
            self._last_words()
        finally:
            self._said.set()
