"""Starting on several backends, and stopping there, when one of them fails in between."""

from __future__ import annotations

import dataclasses
import platform
import re
from typing import Any

import pytest
from manual_clock import Clock
from mixed_fixtures import elsewhere, open_run, spec, store_uri
from scripted_executor import ElsewhereExecutor, ScriptedExecutor

from diloco_cloud import keys
from diloco_cloud.errors import ConfigError, LaunchError, UsageError
from diloco_cloud.executor import LaunchOptions, ReplicaHandle, ReplicaStatus
from diloco_cloud.run import Run, RunSpec, executors, launch, list_runs, start
from diloco_cloud.run.intents import Start, announce
from diloco_cloud.run.lives import Lives, read_lives
from diloco_cloud.run.record import create_run
from diloco_cloud.store import open_store
from diloco_cloud.store.base import ObjectStore

__all__ = ["elsewhere", "spec", "store_uri"]


LAUNCHED_FROM = platform.node()


class Deaf(ScriptedExecutor):
    """Starts replicas, and cannot be reached afterwards."""

    def cancel(self, handle: ReplicaHandle) -> None:
        raise LaunchError("the provider is down")

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        return ReplicaStatus("unknown")


# -- undoing ---------------------------------------------------------------------------------------


def test_replicas_that_cannot_be_undone_are_named_and_not_taken_for_ended(
    spec: RunSpec,
    store_uri: str,
    scripted: ScriptedExecutor,
    elsewhere: ElsewhereExecutor,
    clock: Clock,
) -> None:
    (elsewhere.directory / "refuse.3").touch()
    given = {"scripted": Deaf(), "elsewhere": elsewhere}
    with pytest.raises(LaunchError) as caught:
        launch(spec, store_uri, executor=given, clock=clock.time, sleep=clock.sleep)
    where = f"run-1 --store {store_uri.removeprefix('file://')}"
    assert caught.value.fix == (
        "What had been started on elsewhere was cancelled. Replicas [0, 1] on scripted could not "
        f"be cancelled, and may go on: `diloco-cloud cancel {where}`. "
        f"`diloco-cloud down {where}` deletes what it has written."
    )
    run = open_run(store_uri, clock, given)
    states = [view.state for view in run.status().replicas]
    assert states == ["unknown", "unknown", "cancelled", "failed"]
    with pytest.raises(UsageError, match="Cancel it first"):
        run.down()
    assert open_run(store_uri, clock).cancel() == [0, 1]  # the provider is back
    assert {scripted.poll(handle) for handle in scripted.recover("")} == {"cancelled"}


def test_launch_interrupted_at_its_very_end_cancels_every_side(
    spec: RunSpec,
    store_uri: str,
    scripted: ScriptedExecutor,
    elsewhere: ElsewhereExecutor,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(store: ObjectStore) -> Lives:
        if elsewhere.launched:  # all are started, and it is looked who was cancelled meanwhile
            raise KeyboardInterrupt
        return read_lives(store)

    monkeypatch.setattr(start, "read_lives", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch(spec, store_uri, clock=clock.time)
    states = [one.poll(h) for one in (scripted, elsewhere) for h in one.recover("")]
    assert states == ["cancelled"] * 4
    assert list_runs(store_uri) == []


def test_what_a_refused_launch_has_made_is_given_back(
    spec: RunSpec, store_uri: str, elsewhere: ElsewhereExecutor, clock: Clock
) -> None:
    told: list[object] = []

    class Keeping(ScriptedExecutor):
        def forget(self, handle: ReplicaHandle) -> None:
            told.append(handle.rank)

        def release(self, name: str) -> None:
            told.append(name)

    (elsewhere.directory / "refuse.2").touch()
    given = {"scripted": Keeping(), "elsewhere": elsewhere}
    with pytest.raises(LaunchError):
        launch(spec, store_uri, executor=given, clock=clock.time)
    assert told[:2] == [0, 1]
    assert re.fullmatch(r"run-1-\w{5}", str(told[2]))


def test_error_names_its_backend_once_whatever_it_says(
    spec: RunSpec, store_uri: str, scripted: ScriptedExecutor
) -> None:
    class Full(ElsewhereExecutor):
        def preview_launch(self, *_: object, **__: object) -> Any:
            raise ConfigError("look elsewhere")

    with pytest.raises(ConfigError) as caught:
        launch(spec, store_uri, executor={"scripted": scripted, "elsewhere": Full()})
    assert caught.value.message == "elsewhere: look elsewhere"


# -- a user who cancels meanwhile ------------------------------------------------------------------


def test_side_whose_turn_comes_after_a_cancellation_is_not_started(
    spec: RunSpec, store_uri: str, elsewhere: ElsewhereExecutor, clock: Clock
) -> None:
    class Slow(ScriptedExecutor):
        def launch_replicas(self, *args: Any, **kwargs: Any) -> list[ReplicaHandle]:
            handles = super().launch_replicas(*args, **kwargs)
            open_run(store_uri, clock).cancel()
            return handles

    given = {"scripted": Slow(), "elsewhere": elsewhere}
    run = launch(spec, store_uri, executor=given, clock=clock.time)
    assert elsewhere.launched == []
    assert {view.state for view in run.status().replicas} == {"cancelled"}


def test_one_late_cancellation_that_fails_does_not_keep_the_others(
    spec: RunSpec,
    store_uri: str,
    scripted: ScriptedExecutor,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Late(ElsewhereExecutor):
        """Knows its handles only at the end."""

        def launch_replicas(
            self, *args: Any, options: LaunchOptions, **kwargs: Any
        ) -> list[ReplicaHandle]:
            quiet = dataclasses.replace(options, on_launched=None)
            handles = super().launch_replicas(*args, options=quiet, **kwargs)
            for rank in (2, 3):
                open_run(store_uri, clock).store.create(keys.cancel(rank, 0), b"{}")
            return handles

        def cancel(self, handle: ReplicaHandle) -> None:
            if handle.rank == 2:
                raise LaunchError("the provider is down")
            super().cancel(handle)

    given = {"scripted": scripted, "elsewhere": Late()}
    run = launch(spec, store_uri, executor=given, clock=clock.time)
    states = [view.state for view in run.status().replicas]
    assert states == ["running", "running", "running", "cancelled"]
    assert "replica 2 was cancelled while it was started, and still runs" in caplog.text


# -- cancelling ------------------------------------------------------------------------------------


@pytest.fixture
def orphaned(spec: RunSpec, store_uri: str, elsewhere: ElsewhereExecutor, clock: Clock) -> None:
    """A run whose launcher died when two were started elsewhere, and none was written down."""
    prefix = open_store(store_uri).child("run-1")
    record = create_run(prefix, spec, created_at=clock.now)
    for backend, ranks in spec.ranks_by_backend.items():
        start = Start(ranks=ranks, attempt=0, backend=backend, world_size=4, by="launch")
        announce(prefix, start, at=clock.now)
    options = LaunchOptions(name=record.name, ranks=[2, 3], world_size=4)
    elsewhere.launch_replicas(2, "x", {}, options=options)


class Silent(ElsewhereExecutor):
    """Cannot be asked what it has started."""

    def recover(self, name: str) -> list[ReplicaHandle]:
        raise LaunchError("the provider is down")


@pytest.mark.usefixtures("orphaned")
def test_cancel_that_failed_can_be_repeated(
    store_uri: str, elsewhere: ElsewhereExecutor, clock: Clock
) -> None:
    with pytest.raises(LaunchError) as caught:
        open_run(store_uri, clock, {"elsewhere": Silent()}).cancel()
    assert caught.value.message == (
        "replicas [2, 3] on elsewhere could not be cancelled: the provider is down"
    )
    open_run(store_uri, clock).cancel()
    assert [elsewhere.poll(h) for h in elsewhere.recover("")] == ["cancelled"] * 2


@pytest.mark.usefixtures("orphaned")
def test_down_deletes_nothing_while_a_provider_may_have_more(
    store_uri: str, elsewhere: ElsewhereExecutor, clock: Clock
) -> None:
    deaf = open_run(store_uri, clock, {"elsewhere": Silent()})
    with pytest.raises(LaunchError):
        deaf.cancel()
    assert deaf.status().is_terminal
    with pytest.raises(LaunchError, match=r"replicas \[2, 3\] on elsewhere"):
        deaf.down()
    assert open_run(store_uri, clock).down() > 0
    assert [elsewhere.poll(h) for h in elsewhere.recover("")] == ["cancelled"] * 2


@pytest.mark.usefixtures("orphaned")
def test_cancel_tells_from_where_what_it_cannot_find_was_to_be_started(
    store_uri: str,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "node", lambda: "another-laptop")  # where it is cancelled
    run = open_run(store_uri, clock)
    run.cancel()
    (said,) = [one.getMessage() for one in caplog.records if "about to be started" in one.msg]
    assert said == (
        f"replicas [0, 1] were about to be started on scripted from {LAUNCHED_FROM}, and from here "
        f"nothing is seen of them. If they were, they are called {run.provider_name}…, and "
        f"`diloco-cloud cancel run-1 --store {store_uri.removeprefix('file://')}` there, or with "
        "the same region, account and settings, ends them."
    )


@pytest.mark.usefixtures("orphaned")
def test_cancel_goes_on_after_one_that_fails(
    store_uri: str, elsewhere: ElsewhereExecutor, clock: Clock
) -> None:
    class Flaky(ElsewhereExecutor):
        def cancel(self, handle: ReplicaHandle) -> None:
            if handle.rank == 2:
                raise LaunchError("one request failed")
            super().cancel(handle)

    with pytest.raises(LaunchError) as caught:
        open_run(store_uri, clock, {"elsewhere": Flaky()}).cancel()
    assert caught.value.message == (
        "replicas [2] on elsewhere could not be cancelled: one request failed"
    )
    assert [elsewhere.poll(h) for h in elsewhere.recover("")] == ["running", "cancelled"]


# -- looking and giving back -----------------------------------------------------------------------


def test_backend_that_was_used_in_between_is_released(
    trainer: str, store_uri: str, scripted: ScriptedExecutor, clock: Clock
) -> None:
    released = []

    class Releasing(ElsewhereExecutor):
        def release(self, name: str) -> None:
            released.append(name)

    spec = RunSpec(run_id="run-1", trainer=trainer, backend="scripted", replicas=1)
    there = Releasing()
    given = {"scripted": scripted, "elsewhere": there}
    run = launch(spec, store_uri, executor=given, clock=clock.time)
    scripted.set(0, state="failed", exit_code=1)
    run.resume(backend="elsewhere")
    there.set(0, 1, state="failed", exit_code=1)
    run.resume(backend="scripted")
    assert released == []
    scripted.set(0, 2, state="succeeded", exit_code=0)
    assert run.status().state == "succeeded"
    assert released == [run.provider_name]


def test_status_tells_of_every_backend_that_cannot_be_asked(
    spec: RunSpec, store_uri: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(spec, store_uri, clock=clock.time)

    def absent(name: str, **_: object) -> ScriptedExecutor:
        raise UsageError(f"{name} needs an SDK")

    monkeypatch.setattr(executors, "get_executor", absent)
    run: Run = open_run(store_uri, clock)
    assert run.status().note == "elsewhere needs an SDK; scripted needs an SDK"
