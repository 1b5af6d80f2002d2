"""When a life must end, and what becomes of its work, by a clock that stands still."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from diloco_cloud.outer.hand_over import HandedOver
from diloco_cloud.outer.progress import Progress
from diloco_cloud.replica.lifetime import Lifetime, Notice
from diloco_cloud.replica.termination import Terminated, Termination

SOON_S = 20.0


class Manager:
    """What a termination needs of a manager."""

    def __init__(self) -> None:
        self.progress = Progress(phase="training")
        self.asked = threading.Event()

    def request_hand_over(self) -> None:
        self.asked.set()


class Scene:
    """A termination, everything around it, and the work under it.

    Attributes:
        notices, words: what the witness was told.
        ended: set with the exit code when the process would have ended.
    """

    def __init__(self, lifetime: Lifetime) -> None:
        self.time = 0.0
        self._looked = threading.Event()
        self.notices: list[Notice] = []
        self.words: list[tuple[Notice, BaseException | None]] = []
        self.exit_codes: list[int] = []
        self.ended = threading.Event()
        self.manager: Any = Manager()
        self.termination = Termination(lifetime, now=self._now, end_process=self._end)

    def _now(self) -> float:
        self._looked.set()
        return self.time

    def _end(self, code: int) -> None:
        self.exit_codes.append(code)
        self.ended.set()

    def on_notice(self, notice: Notice) -> None:
        self.notices.append(notice)

    def last_words(self, notice: Notice, error: BaseException | None) -> None:
        self.words.append((notice, error))

    def set_to(self, time: float) -> None:
        """Set the clock, and wake the watching thread."""
        self.time = time
        assert self.termination._sigterm is not None
        self.termination._sigterm.wake()

    def move_to(self, time: float) -> None:
        """Set the clock, and wait until the watching thread has acted on it."""
        for _ in range(2):  # it has acted when it looks again
            self._looked.clear()
            self.set_to(time)
            assert self._looked.wait(SOON_S)

    def run(self, work: Callable[[], Any]) -> Any:
        with self.termination:
            self.termination.follow(self.manager)
            return self.termination.interruptible(work, self)


Stage = Callable[..., Scene]


@pytest.fixture
def stage() -> Iterator[Stage]:
    scenes: list[Scene] = []
    previous = signal.getsignal(signal.SIGTERM)

    def set_up(grace_s: float = 30.0, timeout_s: float = 3600.0) -> Scene:
        scenes.append(Scene(Lifetime(grace_s, 0.0, timeout_s)))
        return scenes[-1]

    yield set_up
    for scene in scenes:
        sigterm = scene.termination._sigterm
        if sigterm is not None and signal.getsignal(signal.SIGTERM) == sigterm._handle:
            scene.set_to(10**6)  # it ended its process, and would not have lived to tidy up
            assert scene.ended.wait(SOON_S)
            sigterm.__exit__()
    assert signal.getsignal(signal.SIGTERM) is previous


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_time_limit_asks_for_a_hand_over_a_grace_before_it(stage: Stage) -> None:
    scene = stage(grace_s=30.0, timeout_s=3600.0)

    def work() -> None:
        scene.move_to(3569.9)
        assert not scene.manager.asked.is_set()
        scene.set_to(3570.0)
        assert scene.manager.asked.wait(SOON_S)
        raise HandedOver

    with pytest.raises(Terminated) as raised:
        scene.run(work)
    assert raised.value.code == 143
    ((notice, error),) = scene.words
    assert (notice.cause, notice.given_at, notice.killed_at) == ("timeout", 3570.0, 3600.0)
    assert isinstance(error, HandedOver)


def test_short_time_limit_leaves_half_of_it_for_training(stage: Stage) -> None:
    scene = stage(grace_s=120.0, timeout_s=60.0)

    def work() -> None:
        scene.move_to(29.0)
        assert not scene.manager.asked.is_set()
        scene.set_to(30.0)
        assert scene.manager.asked.wait(SOON_S)
        raise HandedOver

    with pytest.raises(Terminated):
        scene.run(work)


def test_hand_over_that_does_not_come_is_ended_within_the_grace(stage: Stage) -> None:
    scene = stage(grace_s=30.0)
    moments = {}

    def work() -> None:
        scene.time = 100.0
        terminate()
        assert scene.manager.asked.wait(SOON_S)
        scene.move_to(126.9)
        assert scene.words == []
        moments["last words"] = True
        try:
            scene.set_to(127.0)
            threading.Event().wait(SOON_S)  # Terminated comes here, or before
        finally:
            moments["interrupted"] = True

    with pytest.raises(Terminated):
        scene.run(work)
    assert moments == {"last words": True, "interrupted": True}
    scene.move_to(128.9)
    assert scene.exit_codes == []
    scene.set_to(129.0)
    assert scene.ended.wait(SOON_S)
    assert scene.exit_codes == [143]


@pytest.mark.parametrize("manager", [None, "joining"])
def test_life_without_work_ends_at_once(stage: Stage, manager: str | None) -> None:
    scene = stage()
    if manager is None:
        scene.manager = None
    else:
        scene.manager.progress.phase = manager

    def work() -> None:
        terminate()
        threading.Event().wait(SOON_S)

    with pytest.raises(Terminated):
        scene.run(work)
    assert [notice.cause for notice, _ in scene.words] == ["preempted"]
    assert scene.notices == []


def test_life_that_never_began_ends_at_its_limit(stage: Stage) -> None:
    scene = stage(grace_s=10.0, timeout_s=100.0)
    scene.manager = None

    def work() -> None:
        scene.set_to(90.0)
        threading.Event().wait(SOON_S)

    with pytest.raises(Terminated):
        scene.run(work)
    assert [notice.cause for notice, _ in scene.words] == ["timeout"]


def test_work_that_is_done_in_time_counts(stage: Stage) -> None:
    scene = stage()

    def work() -> str:
        terminate()
        assert scene.manager.asked.wait(SOON_S)
        return "done"

    assert scene.run(work) == "done"
    assert scene.words == []
    assert scene.exit_codes == []


def test_signal_after_the_work_is_let_pass_and_a_second_is_not(stage: Stage) -> None:
    scene = stage()
    with scene.termination:
        assert scene.termination.interruptible(lambda: "done", scene) == "done"
        terminate()
        assert scene.exit_codes == []
        terminate()
        assert scene.ended.wait(SOON_S)
    assert scene.words == []


def test_signal_of_the_provider_at_the_limit_is_not_taken_for_a_second(stage: Stage) -> None:
    scene = stage(grace_s=10.0, timeout_s=100.0)

    def work() -> None:
        scene.move_to(90.0)
        assert scene.manager.asked.wait(SOON_S)
        terminate()
        scene.move_to(91.0)
        assert scene.exit_codes == []
        raise HandedOver

    with pytest.raises(Terminated):
        scene.run(work)


def test_swallowed_interruption_is_raised_again_by_check(stage: Stage) -> None:
    scene = stage()
    scene.manager = None

    def work() -> None:
        try:
            terminate()
            threading.Event().wait(SOON_S)
        except SystemExit:
            pass
        with pytest.raises(Terminated):
            scene.termination.check()

    with pytest.raises(Terminated):
        scene.run(work)


def test_error_without_a_notice_is_raised_as_it_is(stage: Stage) -> None:
    scene = stage()

    def work() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        scene.run(work)
    assert scene.words == []


def test_signal_is_noted_where_an_event_loop_took_the_wakeup_descriptor(stage: Stage) -> None:
    scene = stage()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def work() -> None:
        ours = signal.set_wakeup_fd(writer)
        try:
            terminate()
            assert scene.manager.asked.wait(SOON_S)
        finally:
            signal.set_wakeup_fd(ours)
        raise HandedOver

    with pytest.raises(Terminated):
        scene.run(work)
    assert scene.exit_codes == []
    os.close(reader)
    os.close(writer)


def test_outside_the_main_thread_signals_are_left_alone(stage: Stage) -> None:
    scene = stage()
    before = signal.getsignal(signal.SIGTERM)
    found: list[Any] = []

    def work() -> None:
        found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=scene.run, args=(work,))
    thread.start()
    thread.join(SOON_S)
    assert found == [before]
