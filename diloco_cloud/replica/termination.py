"""A life that must end early: SIGTERM, or its time limit, and what is still done before the end."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias, TypeVar

from diloco_cloud.replica.lifetime import Lifetime, Notice
from diloco_cloud.replica.sigterm import EXIT_CODE, Sigterm

if TYPE_CHECKING:
    from diloco_cloud.outer.manager import MockManager

T = TypeVar("T")

#: Seconds between two attempts to interrupt the main thread.
_INTERRUPT_S: Final = 0.1

#: working → noticed → speaking, or → over from any of the first two.
_State: TypeAlias = Literal["working", "noticed", "speaking", "over"]


class Terminated(SystemExit):
    """This life is over. Raised in the main thread, wherever it is."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class Witness(Protocol):
    """Who is told, each time in a thread of its own that nothing waits for."""

    def on_notice(self, notice: Notice) -> None:
        """There is work, and it is to be handed over."""

    def last_words(self, notice: Notice, error: BaseException | None) -> None:
        """The life is over; ``error`` is what ended the work, None if it has not ended yet."""


class Termination:
    """Ends a replica's life in time and in order; a context manager.

    A *notice* is a SIGTERM, or the approach of the time limit. If there is work that the run does
    not have yet, the manager is asked to hand it over, and its training thread ends with
    ``HandedOver`` at the next inner step. If there is none, as while the trainer is imported,
    prepares its data or joins the run, :class:`Terminated` is raised in the main thread at once;
    so it is when the time for handing over has passed. Work that is done meanwhile has succeeded.

    Last words and the end wait for nobody. Unwinding takes as long as the trainer's ``finally``
    blocks and the store's requests do, so the last words are said in a thread of their own, and
    the process ends by ``os._exit`` shortly before it would be killed. An ordinary exit would join
    the threads of every executor first, and one that is stuck in an upload can be neither
    cancelled nor abandoned. A second SIGTERM ends the process at once.

    Outside the main thread nothing of this is done: the process is not the replica's to end.

    Args:
        lifetime: grace and time limit.
        now: seconds, monotonic.
        end_process: takes the exit code and does not return.
    """

    def __init__(
        self,
        lifetime: Lifetime,
        *,
        now: Callable[[], float] = time.monotonic,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._lifetime = lifetime
        self._now = now
        self._end_process = end_process
        self._manager: MockManager | None = None
        self._state: _State = "working"
        self._lock = threading.Lock()
        self._interruptible = self._ended = self._closed = False
        self._error: BaseException | None = None
        self._said = threading.Event()
        self._sigterm: Sigterm | None = None
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Termination:
        if threading.current_thread() is threading.main_thread():
            self._sigterm = Sigterm(self._in_main_thread).__enter__()
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._sigterm is None or self._state == "speaking":
            return
        self._closed = True
        if self._watcher is not None:
            self._sigterm.wake()
            self._watcher.join()
        self._sigterm.__exit__()

    # -- in the main thread ----------------------------------------------------------------------

    def follow(self, manager: MockManager) -> None:
        """Have ``manager`` hand over, from now on, if its replica has begun to train."""
        self._manager = manager

    def interruptible(self, work: Callable[[], T], witness: Witness) -> T:
        """The result of ``work``, unless it is ended early. To be called once.

        Args:
            work: called in this thread.
            witness: is told of the end.

        Raises:
            Terminated: whatever became of ``work``: it may have handed over, have caught the
                exception, or have raised another one while it unwound.
            BaseException: what ``work`` raises by itself.
        """
        self._start_watching(witness)
        try:
            try:
                self._interruptible = True
                self.check()
                result = work()
            finally:
                self._interruptible = False
        except BaseException as error:
            if self._move("over", ("working",)):
                raise
            self._error = error
        else:
            if self._move("over", ("working", "noticed")):
                return result
        self._await_last_words()
        raise Terminated from None

    def check(self) -> None:
        """Raise ``Terminated`` again, if it was raised before: a trainer may have caught it."""
        if self._state == "speaking":
            raise Terminated

    def _await_last_words(self) -> None:
        self._ended = True
        assert self._sigterm is not None
        self._sigterm.wake()
        self._said.wait()  # or until the process ends, which the watcher sees to

    def _in_main_thread(self) -> None:
        if self._interruptible and self._state == "speaking":
            self._interruptible = False
            raise Terminated

    # -- in a thread that watches ----------------------------------------------------------------

    def _start_watching(self, witness: Witness) -> None:
        if self._sigterm is not None:
            arguments = (self._sigterm, witness)
            self._watcher = threading.Thread(
                target=self._watch, args=arguments, name="diloco-watch", daemon=True
            )
            self._watcher.start()

    def _watch(self, sigterm: Sigterm, witness: Witness) -> None:
        notice = self._await_notice(sigterm)
        if notice is None or not self._end_early(sigterm, witness, notice):
            # The work is done: what is left is short, and should be finished.
            while not self._closed:
                self._end_at_second(sigterm)
                sigterm.wait(math.inf)

    def _end_early(self, sigterm: Sigterm, witness: Witness, notice: Notice) -> bool:
        """Act on a notice; whether that has ended this life, and not the work itself."""
        if not self._move("noticed", ("working",)):
            return False
        if self._request_hand_over():
            _aside(lambda: witness.on_notice(notice))
            self._await(sigterm, notice.last_words_at, lambda: self._ended or self._closed)
        if not self._move("speaking", ("noticed",)):
            return False
        _aside(lambda: witness.last_words(notice, self._error), self._said.set)
        _aside(lambda: self._interrupt(sigterm))
        self._await(sigterm, notice.exit_at, lambda: False)
        self._end_process(EXIT_CODE)
        return True

    def _await_notice(self, sigterm: Sigterm) -> Notice | None:
        """The notice, when it is given; None if this life ends by itself."""
        while not self._closed:
            now = self._now()
            if sigterm.count > 0:
                return self._lifetime.notice("preempted", now)
            if now >= self._lifetime.hand_over_at:
                return self._lifetime.notice("timeout", now)
            sigterm.wait(self._lifetime.hand_over_at - now)
        return None

    def _request_hand_over(self) -> bool:
        """Ask for what this life has done; whether it has done anything."""
        manager = self._manager
        if manager is None or manager.progress.phase == "joining":
            return False
        manager.request_hand_over()
        return True

    def _await(self, sigterm: Sigterm, moment: float, settled: Callable[[], bool]) -> None:
        """Wait for ``moment``, or until there is nothing to wait for."""
        while not settled() and (left := moment - self._now()) > 0:
            self._end_at_second(sigterm)
            sigterm.wait(left)

    def _interrupt(self, sigterm: Sigterm) -> None:
        """Have ``Terminated`` raised in the main thread, for as long as there is work.

        More than once: a signal that comes just before a system call does not interrupt it.
        """
        while self._interruptible:
            sigterm.interrupt()
            time.sleep(_INTERRUPT_S)

    def _end_at_second(self, sigterm: Sigterm) -> None:
        if sigterm.count > 1:
            self._end_process(EXIT_CODE)

    def _move(self, to: _State, allowed: tuple[_State, ...]) -> bool:
        with self._lock:
            if self._state not in allowed:
                return False
            self._state = to
            return True


def _aside(work: Callable[[], None], finally_: Callable[[], None] = lambda: None) -> None:
    def run() -> None:
        try:
            work()
        finally:
            finally_()

    threading.Thread(target=run, name="diloco-aside", daemon=True).start()
