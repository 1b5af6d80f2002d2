"""Resuming over several backends: asked on all, announced on all, done on all or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from clocked_store import ClockedStore
from manual_clock import Clock
from mixed_fixtures import elsewhere, open_run, spec
from mixed_fixtures import store_uri as shared_uri
from run_fixtures import reopen
from scripted_executor import ElsewhereExecutor, ScriptedExecutor

from diloco_cloud import keys
from diloco_cloud.errors import ConfigError, LaunchError, UsageError
from diloco_cloud.executor import ReplicaHandle
from diloco_cloud.run import Run, RunSpec, launch
from diloco_cloud.run.record import change_size, read_json

__all__ = ["elsewhere", "shared_uri", "spec"]

FAILED = {"state": "failed", "exit_code": 1, "reason": "exit_code"}
PREEMPTED = {"state": "failed", "exit_code": -9, "reason": "preempted"}


@pytest.fixture
def run(spec: RunSpec, shared_uri: str, clock: Clock) -> Run:
    launch(spec, shared_uri, clock=clock.time)
    return open_run(shared_uri, clock)


def test_resume_that_one_backend_refuses_changes_nothing(
    run: Run, shared_uri: str, scripted: ScriptedExecutor, clock: Clock
) -> None:
    class Moon(ElsewhereExecutor):
        def preview_launch(self, *_: object, **__: object) -> Any:
            raise ConfigError("there is no GPU B300 here")

    scripted.set(1, **FAILED)
    mine = open_run(shared_uri, clock, {"scripted": scripted, "elsewhere": Moon()})
    with pytest.raises(ConfigError, match="elsewhere: there is no GPU B300 here"):
        mine.resume(replicas={"scripted": 2, "elsewhere": 5})
    status = run.status()
    assert (status.size, [view.attempt for view in status.replicas]) == (4, [0] * 4)
    assert (1, 1) not in scripted.launched


def test_run_that_could_not_grow_has_its_old_size(
    run: Run, shared_uri: str, scripted: ScriptedExecutor, elsewhere: ElsewhereExecutor
) -> None:
    (elsewhere.directory / "refuse.4").touch()
    with pytest.raises(LaunchError):
        run.resume(replicas={"scripted": 2, "elsewhere": 3})
    assert run.status().size == 4
    for executor, ranks in ((scripted, (0, 1)), (elsewhere, (2, 3))):
        for rank in ranks:
            executor.set(rank, state="succeeded", exit_code=0)
    assert run.status().state == "succeeded"


def test_resume_that_the_second_backend_fails_is_undone_on_the_first(
    run: Run, scripted: ScriptedExecutor, elsewhere: ElsewhereExecutor
) -> None:
    scripted.set(0, **FAILED)
    elsewhere.set(3, **FAILED)
    (elsewhere.directory / "refuse.3").touch()
    with pytest.raises(LaunchError) as caught:
        run.resume()
    assert caught.value.fix == "What had been started on scripted was cancelled."
    states = [view.state for view in run.status().replicas]
    assert states == ["cancelled", "running", "running", "failed"]


def test_resume_announces_all_before_it_starts_the_first(
    run: Run, shared_uri: str, scripted: ScriptedExecutor, clock: Clock
) -> None:
    seen = []

    class Looking(ScriptedExecutor):
        def launch_replicas(self, *args: Any, **kwargs: Any) -> list[ReplicaHandle]:
            lives = ((0, 1), (4, 0), (5, 0))
            intents = [read_json(run.store, keys.intent(*life)) for life in lives]
            seen.extend(intent and intent["backend"] for intent in intents)
            return super().launch_replicas(*args, **kwargs)

    scripted.set(0, **FAILED)
    given = {"scripted": Looking(), "elsewhere": ElsewhereExecutor()}
    mover = open_run(shared_uri, clock, given)
    assert mover.resume(replicas={"scripted": 2, "elsewhere": 4}) == [0, 4, 5]
    assert seen == ["scripted", "elsewhere", "elsewhere"]


def test_new_rank_that_nobody_announced_belongs_where_it_was_to_go(
    run: Run, elsewhere: ElsewhereExecutor, clock: Clock
) -> None:
    """Whoever resumed the run died right after it had changed the size."""
    store = ClockedStore(run.store, clock)
    change_size(store, 1, 5, {4: "elsewhere"}, at=clock.now)
    again = reopen(store, clock)
    assert again.status().replicas[4].backend == "elsewhere"
    clock.now += 61
    again.supervisor().look(again.status())
    assert (4, 0) in elsewhere.launched


def test_resume_tells_which_ranks_someone_else_is_starting(
    run: Run,
    scripted: ScriptedExecutor,
    elsewhere: ElsewhereExecutor,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    scripted.set(0, **PREEMPTED)
    elsewhere.set(3, **PREEMPTED)
    store = ClockedStore(run.store, clock)

    def race(key: str) -> None:
        if key == keys.intent(3, 1):
            store.before_create = lambda _key: None
            run.store.create(key, b"{}")

    store.before_create = race
    assert reopen(store, clock).resume() == [0]
    assert "replicas [3] are being started by someone else" in caplog.text
    assert (3, 1) not in elsewhere.launched


def test_resume_of_two_that_change_the_size_starts_nothing_for_the_loser(
    run: Run, elsewhere: ElsewhereExecutor, clock: Clock
) -> None:
    store = ClockedStore(run.store, clock)

    def race(key: str) -> None:
        if key == keys.size(1):
            store.before_create = lambda _key: None
            assert reopen(store, clock).resume(replicas={"scripted": 2, "elsewhere": 3}) == [4]

    store.before_create = race
    with pytest.raises(UsageError, match="just changed by someone else"):
        reopen(store, clock).resume(replicas={"scripted": 2, "elsewhere": 4})
    status = run.status()
    assert (status.size, len(status.replicas), status.state) == (5, 5, "running")


def test_resume_elsewhere_cannot_meet_in_a_plain_directory(
    make_run: Callable[..., Run], scripted: ScriptedExecutor, elsewhere: ElsewhereExecutor
) -> None:
    run = make_run()
    scripted.set(1, **FAILED)
    with pytest.raises(ConfigError) as caught:
        run.resume(backend="elsewhere")
    assert "replicas on scripted and elsewhere cannot meet in" in caught.value.message
    assert elsewhere.launched == []
    scripted.set(0, **FAILED)
    assert run.resume(backend="elsewhere") == [0, 1]  # none stays where it was


def test_succeeded_replica_takes_nobodys_place(
    run: Run, scripted: ScriptedExecutor, elsewhere: ElsewhereExecutor
) -> None:
    scripted.set(0, state="succeeded", exit_code=0)
    scripted.set(1, **FAILED)
    assert run.resume(replicas={"elsewhere": 4}) == [1]
    assert (1, 1) in elsewhere.launched
