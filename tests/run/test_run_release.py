"""What an executor keeps for a run as a whole is given back once the run has ended."""

from __future__ import annotations

from collections.abc import Callable

from manual_clock import Clock
from scripted_executor import ScriptedExecutor

from diloco_cloud.run import Run


class Releasing(ScriptedExecutor):
    """Notes which runs it has been asked to release."""

    def __init__(self) -> None:
        super().__init__()
        self.released: list[str] = []

    def release(self, name: str) -> None:
        self.released.append(name)


def _open(store_uri: str, clock: Clock) -> tuple[Run, Releasing]:
    executor = Releasing()
    run = Run.open(store_uri, "run-1", executor=executor, clock=clock.time, sleep=clock.sleep)
    return run, executor


def test_status_releases_a_run_that_has_ended_and_no_other(
    make_run: Callable[..., Run], scripted: ScriptedExecutor, store_uri: str, clock: Clock
) -> None:
    make_run()
    run, executor = _open(store_uri, clock)
    scripted.set(0, state="succeeded", exit_code=0)
    run.status()
    assert executor.released == []
    scripted.set(1, state="succeeded", exit_code=0)
    run.status()
    assert executor.released == [run.provider_name]


def test_supervisor_releases_a_run_when_it_is_done_with_it(
    make_run: Callable[..., Run], scripted: ScriptedExecutor, store_uri: str, clock: Clock
) -> None:
    make_run()
    run, executor = _open(store_uri, clock)
    scripted.set(0, state="succeeded", exit_code=0)
    clock.scheduled = [lambda: scripted.set(1, state="failed", exit_code=1)]
    assert run.supervise(max_restarts=0).state == "failed"
    assert executor.released == [run.provider_name]


def test_executor_that_keeps_nothing_is_not_asked(
    make_run: Callable[..., Run], scripted: ScriptedExecutor
) -> None:
    run = make_run()
    for rank in range(2):
        scripted.set(rank, state="succeeded", exit_code=0)
    assert run.status().is_terminal
