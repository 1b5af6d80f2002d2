"""A supervisor on a machine that cannot start replicas on every backend of the run."""

from __future__ import annotations

from typing import Any

import pytest
from clocked_store import ClockedStore
from manual_clock import Clock
from mixed_fixtures import elsewhere, open_run, store_uri
from scripted_executor import ElsewhereExecutor, ScriptedExecutor

from diloco_cloud import keys
from diloco_cloud.errors import LaunchError, UsageError
from diloco_cloud.run import Run, RunSpec, Side, launch
from diloco_cloud.run.record import read_json
from diloco_cloud.run.restarter import Event

__all__ = ["elsewhere", "store_uri"]

PREEMPTED: dict[str, Any] = {"state": "failed", "exit_code": -9, "reason": "preempted"}
DONE: dict[str, Any] = {"state": "succeeded", "exit_code": 0}


class WithoutLogin(ScriptedExecutor):
    """Can look, and knows before a launch that it may not."""

    def preview_launch(self, *_: object, **__: object) -> Any:
        raise UsageError("nobody is logged in")


class Rejected(ScriptedExecutor):
    """Finds out only when it launches."""

    def launch_replicas(self, *_: object, **__: object) -> Any:
        raise UsageError("nobody is logged in")


@pytest.fixture
def run(
    trainer: str,
    elsewhere: ElsewhereExecutor,
    store_uri: str,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Two replicas on a backend, and a secret for those that will be moved to another one."""
    monkeypatch.setenv("THEIR_KEY", "theirs")
    fleet = (Side("scripted", 2), Side("elsewhere", 0, secrets=("KEY=THEIR_KEY",)))
    launch(RunSpec(run_id="run-1", trainer=trainer, fleet=fleet), store_uri, clock=clock.time)
    return open_run(store_uri, clock)


def _on(run: Run, clock: Clock, executor: ScriptedExecutor) -> Run:
    """The run on a machine with such an executor, in a store with the test's clock."""
    store = ClockedStore(run.store, clock)
    return Run(store, run._record, executor=executor, clock=clock.time, sleep=clock.sleep)


@pytest.mark.parametrize("kind", [WithoutLogin, Rejected])
def test_machine_that_cannot_start_a_replica_leaves_it_to_others(
    run: Run, scripted: ScriptedExecutor, clock: Clock, kind: type[ScriptedExecutor]
) -> None:
    scripted.set(0, **PREEMPTED)
    laptop, events = _on(run, clock, kind()), list[Event]()
    supervisor = laptop.supervisor(on_event=events.append)
    for _ in range(3):
        supervisor.look(laptop.status())
        clock.now += 5
    refused = [event for event in events if event.kind == "refused"]
    assert [event.text for event in refused] == [
        "replica 0 cannot be started from here: nobody is logged in"
    ]
    if kind is WithoutLogin:
        assert read_json(run.store, keys.intent(0, 1)) is None
    clock.now += 15
    server = _on(run, clock, ScriptedExecutor())
    there = server.supervisor()
    there.look(server.status())
    clock.now += 15  # what the laptop tried may have counted
    there.look(server.status())
    assert any(rank == 0 and attempt > 0 for rank, attempt in scripted.launched)


def test_machine_that_cannot_start_a_replica_tries_again_later(
    run: Run, scripted: ScriptedExecutor, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.set(0, **PREEMPTED)
    laptop = _on(run, clock, WithoutLogin())
    supervisor = laptop.supervisor()
    assert supervisor.look(laptop.status()) is False  # nothing that can be started from here
    monkeypatch.setattr(WithoutLogin, "preview_launch", ScriptedExecutor.preview_launch)
    supervisor.look(laptop.status())
    assert (0, 1) not in scripted.launched
    clock.now += 60
    assert supervisor.look(laptop.status()) is True
    assert (0, 1) in scripted.launched


def test_provider_that_cannot_be_asked_before_a_start_is_waited_for(
    run: Run, scripted: ScriptedExecutor, clock: Clock
) -> None:
    class Down(ScriptedExecutor):
        def preview_launch(self, *_: object, **__: object) -> Any:
            raise LaunchError("the provider is down")

        launch_replicas = preview_launch

    scripted.set(0, **PREEMPTED)
    laptop = _on(run, clock, Down())
    laptop.supervisor().look(laptop.status())
    view = laptop.status().replicas[0]
    assert (view.attempt, view.reason, view.restartable) == (1, "no_capacity", True)


def test_supervisor_that_nothing_is_left_for_ends(
    run: Run, scripted: ScriptedExecutor, clock: Clock
) -> None:
    scripted.set(0, **PREEMPTED)
    clock.scheduled = [lambda: None, lambda: scripted.set(1, **DONE)]
    assert _on(run, clock, WithoutLogin()).supervise().state == "failed"


def test_supervisor_goes_on_when_a_replica_is_moved_to_where_it_cannot_start_any(
    run: Run,
    scripted: ScriptedExecutor,
    elsewhere: ElsewhereExecutor,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = list[Event]()
    supervisor = run.supervisor(on_event=events.append)
    supervisor.look(run.status())
    scripted.set(1, state="failed", exit_code=1)
    run.resume([1], backend="elsewhere")
    monkeypatch.delenv("THEIR_KEY")
    for executor, life in ((scripted, (0, 0)), (elsewhere, (1, 1))):
        executor.set(*life, **PREEMPTED)
    for _ in range(2):
        supervisor.look(run.status())
    assert [(event.kind, event.rank) for event in events] == [
        ("trouble", None),
        ("died", 0),
        ("restarted", 0),
    ]
    assert "replicas on elsewhere cannot be started from here: " in events[0].text
    assert scripted.launched == [(0, 0), (0, 1), (1, 0)]
    monkeypatch.setenv("THEIR_KEY", "theirs")
    supervisor.look(run.status())
    assert (1, 2) in elsewhere.launched


def test_supervisor_needs_nothing_for_replicas_that_have_ended(
    run: Run,
    scripted: ScriptedExecutor,
    elsewhere: ElsewhereExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted.set(1, state="failed", exit_code=1)
    run.resume([1], backend="elsewhere")
    elsewhere.set(1, 1, **DONE)
    scripted.set(0, **PREEMPTED)
    monkeypatch.delenv("THEIR_KEY")
    run.supervisor().look(run.status())
    assert (0, 1) in scripted.launched
