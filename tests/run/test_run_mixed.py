"""A run on two backends at once: launched on both or on neither, and looked after on each."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from manual_clock import Clock
from mixed_fixtures import elsewhere, open_run, store_uri
from replica_writer import ReplicaWriter
from scripted_executor import ElsewhereExecutor, ScriptedExecutor

from diloco_cloud import keys
from diloco_cloud.errors import ConfigError, LaunchError, MissingDependencyError, UsageError
from diloco_cloud.executor import LaunchOptions
from diloco_cloud.run import Run, RunSpec, Side, executors, launch, list_runs
from diloco_cloud.run.intents import Start, announce
from diloco_cloud.run.record import create_run
from diloco_cloud.run.start import start_replicas
from diloco_cloud.store import open_store

__all__ = ["elsewhere", "store_uri"]

FLEET = (
    Side("scripted", 2, "A100", {"WHERE": "here"}, ("KEY=OUR_KEY",)),
    Side("elsewhere", 2, "a10g", secrets=("KEY=THEIR_KEY",)),
)


@pytest.fixture
def spec(trainer: str, elsewhere: ElsewhereExecutor, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    """Two replicas on each of two backends, with credentials of their own."""
    monkeypatch.setenv("OUR_KEY", "ours")
    monkeypatch.setenv("THEIR_KEY", "theirs")
    return RunSpec(run_id="run-1", trainer=trainer, fleet=FLEET)


@pytest.fixture
def run(spec: RunSpec, elsewhere: ElsewhereExecutor, store_uri: str, clock: Clock) -> Run:
    """The run, launched by one process and opened by another."""
    launch(spec, store_uri, clock=clock.time)
    return open_run(store_uri, clock)


def _request(executor: ScriptedExecutor, rank: int, attempt: int = 0) -> dict[str, Any]:
    found = json.loads((executor.directory / f"{rank}.{attempt}.json").read_text())
    request: dict[str, Any] = found["request"]
    return request


def test_each_side_is_launched_with_its_own_settings(
    run: Run, scripted: ScriptedExecutor, elsewhere: ElsewhereExecutor
) -> None:
    assert (scripted.launched, elsewhere.launched) == ([(0, 0), (1, 0)], [(2, 0), (3, 0)])
    ours, theirs = _request(scripted, 0), _request(elsewhere, 2)
    assert (ours["gpu"], ours["secrets"], ours["env"]) == (
        "A100",
        ["KEY=OUR_KEY"],
        {"WHERE": "here"},
    )
    assert (theirs["gpu"], theirs["secrets"]) == ("a10g", ["KEY=THEIR_KEY"])
    assert ours["world_size"] == theirs["world_size"] == 4
    assert ours["entrypoint_args"] == theirs["entrypoint_args"]
    status = run.status()
    assert [view.backend for view in status.replicas] == ["scripted"] * 2 + ["elsewhere"] * 2
    assert (status.state, status.backends) == ("running", ("scripted", "elsewhere"))


def test_executors_may_be_given_by_backend(spec: RunSpec, store_uri: str, clock: Clock) -> None:
    given = {"scripted": ScriptedExecutor(region="x"), "elsewhere": ElsewhereExecutor(region="y")}
    run = launch(spec, store_uri, executor=given, clock=clock.time)
    assert _request(given["scripted"], 1)["region"] == "x"
    assert _request(given["elsewhere"], 3)["region"] == "y"
    assert run.executor is given["scripted"]


def test_replica_is_started_again_where_it_was(
    run: Run, scripted: ScriptedExecutor, elsewhere: ElsewhereExecutor, clock: Clock
) -> None:
    for rank in range(4):
        ReplicaWriter(run.store, rank).beat(round=1)
    for executor, rank in ((scripted, 1), (elsewhere, 2)):
        executor.set(rank, state="failed", exit_code=-9, reason="preempted")

    def finish() -> None:
        for executor, lives in ((scripted, [(0, 0), (1, 1)]), (elsewhere, [(2, 1), (3, 0)])):
            for life in lives:
                executor.set(*life, state="succeeded", exit_code=0)

    clock.scheduled = [finish]
    assert run.supervise().state == "succeeded"
    assert (1, 1) in scripted.launched
    assert (2, 1) in elsewhere.launched
    assert _request(elsewhere, 2, 1)["secrets"] == ["KEY=THEIR_KEY"]


# -- all or nothing --------------------------------------------------------------------------------


def test_launch_that_the_second_side_refuses_cancels_the_first(
    spec: RunSpec,
    store_uri: str,
    scripted: ScriptedExecutor,
    elsewhere: ElsewhereExecutor,
    clock: Clock,
) -> None:
    (elsewhere.directory / "refuse.3").touch()
    with pytest.raises(LaunchError) as caught:
        launch(spec, store_uri, clock=clock.time)
    assert "backend 'elsewhere' failed to start the replicas: out of capacity" in str(caught.value)
    assert "What had been started on scripted and elsewhere was cancelled." in str(caught.value)
    states = [one.poll(h) for one in (scripted, elsewhere) for h in one.recover("")]
    assert states == ["cancelled"] * 3
    assert list_runs(store_uri) == []


def test_launch_that_the_first_side_refuses_starts_nothing_on_the_second(
    spec: RunSpec,
    store_uri: str,
    scripted: ScriptedExecutor,
    elsewhere: ElsewhereExecutor,
    clock: Clock,
) -> None:
    (scripted.directory / "refuse.0").touch()
    with pytest.raises(LaunchError, match="backend 'scripted' failed"):
        launch(spec, store_uri, clock=clock.time)
    assert elsewhere.launched == []
    assert list_runs(store_uri) == []


def test_launch_interrupted_on_the_second_side_cancels_the_first(
    spec: RunSpec, store_uri: str, scripted: ScriptedExecutor, clock: Clock
) -> None:
    class Interrupted(ElsewhereExecutor):
        def set(self, rank: int | str, attempt: int = 0, **values: Any) -> None:
            raise KeyboardInterrupt

    given = {"scripted": ScriptedExecutor(), "elsewhere": Interrupted()}
    with pytest.raises(KeyboardInterrupt):
        launch(spec, store_uri, executor=given, clock=clock.time)
    assert [scripted.poll(handle) for handle in scripted.recover("")] == ["cancelled"] * 2
    assert list_runs(store_uri) == []


@pytest.mark.parametrize(
    ("backend_args", "message"),
    [
        ({"elsewhere": {"region": "moon"}}, "elsewhere: there is no region moon\n  Stay on earth"),
        ({"elsewhere": {"regoin": "us"}}, "the backend 'elsewhere' has no setting 'regoin'"),
    ],
)
def test_what_one_side_refuses_leaves_no_run_behind(
    trainer: str,
    elsewhere: ElsewhereExecutor,
    scripted: ScriptedExecutor,
    store_uri: str,
    backend_args: dict[str, dict[str, str]],
    message: str,
) -> None:
    fleet = [Side("scripted", 1), Side("elsewhere", 1)]
    spec = RunSpec(run_id="run-1", trainer=trainer, fleet=fleet, backend_args=backend_args)
    with pytest.raises(ConfigError) as caught:
        launch(spec, store_uri)
    assert message in str(caught.value)
    assert scripted.launched == []
    assert not open_store(store_uri).list_dirs("")


def test_every_sides_secrets_are_looked_for(
    spec: RunSpec, store_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("THEIR_KEY")
    with pytest.raises(UsageError, match="the variable given after KEY= is not set"):
        launch(spec, store_uri)


def test_fleet_cannot_meet_in_a_plain_directory(
    spec: RunSpec, elsewhere: ElsewhereExecutor, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        launch(spec, tmp_path / "store")
    assert "replicas on scripted and elsewhere cannot meet in" in str(caught.value)
    assert f"write file://{tmp_path}/store" in str(caught.value)


# -- a launcher that dies --------------------------------------------------------------------------


def _left_by_a_dead_launcher(spec: RunSpec, store_uri: str, clock: Clock) -> Run:
    """Everything is announced and one side started; of the other, one replica, unrecorded."""
    prefix = open_store(store_uri).child("run-1")
    record = create_run(prefix, spec, created_at=clock.now)
    starts = {
        backend: Start(ranks=ranks, attempt=0, backend=backend, world_size=4, by="launch")
        for backend, ranks in spec.ranks_by_backend.items()
    }
    for start in starts.values():
        announce(prefix, start, at=clock.now)
    start_replicas(prefix, record, ScriptedExecutor(), starts["scripted"], clock=clock.time)
    options = LaunchOptions(name=record.name, ranks=[2], world_size=4)
    ElsewhereExecutor().launch_replicas(1, "x", {}, options=options)
    return open_run(store_uri, clock)


def test_cancel_finds_what_a_dead_launcher_started_on_every_side(
    spec: RunSpec,
    store_uri: str,
    clock: Clock,
    scripted: ScriptedExecutor,
    elsewhere: ElsewhereExecutor,
) -> None:
    run = _left_by_a_dead_launcher(spec, store_uri, clock)
    assert [view.state for view in run.status().replicas] == ["running"] * 2 + ["pending"] * 2
    run.cancel()
    for executor, count in ((scripted, 2), (elsewhere, 1)):
        found = [executor.poll(handle) for handle in executor.recover(run.provider_name)]
        assert found == ["cancelled"] * count
    assert run.status().state == "cancelled"


def test_cancel_ends_one_side_where_the_other_cannot_be_asked(
    run: Run,
    scripted: ScriptedExecutor,
    elsewhere: ElsewhereExecutor,
    store_uri: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str, **kwargs: Any) -> ScriptedExecutor:
        if name == "scripted":
            raise MissingDependencyError("scripted needs an SDK", fix="pip install it")
        return ElsewhereExecutor(**kwargs)

    monkeypatch.setattr(executors, "get_executor", absent)
    with pytest.raises(MissingDependencyError, match="scripted needs an SDK"):
        Run.open(store_uri, "run-1").cancel()
    assert {elsewhere.poll(h) for h in elsewhere.recover("")} == {"cancelled"}
    assert {scripted.poll(h) for h in scripted.recover("")} == {"running"}
    for rank in range(4):  # the wish is known all the same
        assert run.store.head(keys.cancel(rank, 0))


# -- resuming --------------------------------------------------------------------------------------


def _end(run: Run, *executors_and_ranks: tuple[ScriptedExecutor, int]) -> None:
    for executor, rank in executors_and_ranks:
        executor.set(rank, state="failed", exit_code=1, reason="exit_code")


def test_resume_with_another_fleet_moves_and_adds(
    run: Run, scripted: ScriptedExecutor, elsewhere: ElsewhereExecutor
) -> None:
    _end(run, (scripted, 0), (scripted, 1), (elsewhere, 3))
    started = run.resume(replicas={"scripted": 1, "elsewhere": 4})
    assert started == [0, 1, 3, 4]
    places = {view.rank: view.backend for view in run.status().replicas}
    assert places == {
        0: "scripted",  # where it was, as there is room for one
        1: "elsewhere",
        2: "elsewhere",
        3: "elsewhere",
        4: "elsewhere",
    }
    assert _request(elsewhere, 1, 1)["secrets"] == ["KEY=THEIR_KEY"]
    assert _request(elsewhere, 4, 1)["world_size"] == 5


def test_resume_on_one_backend_gives_its_settings(
    run: Run, scripted: ScriptedExecutor, elsewhere: ElsewhereExecutor
) -> None:
    _end(run, (scripted, 1), (elsewhere, 3))
    assert run.resume(backend="elsewhere") == [1, 3]
    assert _request(elsewhere, 1, 1)["gpu"] == "a10g"
    assert run.status().backends == ("scripted", "elsewhere")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"replicas": {"elsewhere": 4}},
            "replica 0 is running on scripted, where there would be n",
        ),
        ({"replicas": {"scripted": 1, "elsewhere": 3}}, "where there would be only 1"),
        ({"replicas": {"scripted": 2, "elsewere": 2}}, "Did you mean 'elsewhere'?"),
        ({"replicas": {"scripted": 4, "elsewhere": 0}}, "replicas on elsewhere is 0"),
        ({"replicas": {"scripted": 4}, "backend": "scripted"}, "and one backend for all"),
        ({"replicas": {"scripted": 4}, "ranks": [3]}, "replicas are named, and their number"),
    ],
)
def test_resume_refuses_a_fleet_that_cannot_be(
    run: Run, elsewhere: ElsewhereExecutor, settings: dict[str, Any], message: str
) -> None:
    _end(run, (elsewhere, 3))
    with pytest.raises(UsageError) as caught:
        run.resume(**settings)
    assert message in str(caught.value)
    assert run.status().size == 4


# -- reducers --------------------------------------------------------------------------------------


def test_reducers_are_on_the_backend_that_is_chosen(
    spec: RunSpec, store_uri: str, scripted: ScriptedExecutor, elsewhere: ElsewhereExecutor
) -> None:
    launch(dataclasses.replace(spec, backend="elsewhere", reducers=1), store_uri)
    assert (scripted.launched_as("R"), elsewhere.launched_as("R")) == ([], [(0, 0)])
    request = json.loads((elsewhere.directory / "R0.0.json").read_text())["request"]
    assert (request["gpu"], request["secrets"]) == (None, ["KEY=THEIR_KEY"])
