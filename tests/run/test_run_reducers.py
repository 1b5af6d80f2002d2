"""Volunteer reducers: started, followed and stopped beside the replicas, and never in their way."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from manual_clock import Clock
from scripted_executor import ScriptedExecutor

from diloco_cloud import keys
from diloco_cloud.errors import ConfigError, DilocoError, UsageError
from diloco_cloud.run import Run, RunSpec
from diloco_cloud.run.export import export_request
from diloco_cloud.run.reducers import Reducers
from diloco_cloud.run.restarter import Event

MakeRun = Callable[..., Run]

KILLED = {"state": "failed", "exit_code": -9, "message": "killed by SIGKILL"}
DONE = {"state": "succeeded", "exit_code": 0}


def _beat(run: Run, index: int, attempt: int = 0, served: int = 0, reducer: bool = True) -> None:
    beat = {"rank": index, "attempt": attempt, "state": "reducing", "round": served}
    store = run.store.child(keys.REDUCERS) if reducer else run.store
    store.put(keys.alive(index), json.dumps(beat).encode())


def _states(run: Run) -> list[str]:
    return [view.state for view in _reducers(run)._observer.observe().replicas]


def _reducers(run: Run, **options: Any) -> Reducers:
    return Reducers(run.store, run._record, run._executors, clock=run._clock, **options)


def _look(run: Run, reducers: Reducers) -> None:
    """One look of a supervisor's, waited for."""
    reducers.look(run.status())
    if reducers._work is not None:
        reducers._work.result(timeout=60)


def test_reducers_are_launched_without_a_gpu_after_their_intents(
    make_run: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_run(reducers=2, gpu="H100", secrets=(), env={"A": "1"})
    assert scripted.launched == [(0, 0), (1, 0)]
    assert scripted.launched_as("R") == [(0, 0), (1, 0)]
    request = json.loads((scripted.directory / "R1.0.json").read_text())["request"]
    assert request["entrypoint"] == "diloco_cloud.reducer_entrypoint"
    assert request["entrypoint_args"] == {
        "rendezvous_uri": run.store.uri,
        "spec_hash": run.spec.digest,
    }
    assert (request["gpu"], request["world_size"]) == (None, 2)
    names = {info.key for info in run.store.list(f"{keys.REDUCERS}/replicas/")}
    for index in range(2):
        assert f"{keys.REDUCERS}/{keys.intent(index, 0)}" in names
        assert f"{keys.REDUCERS}/{keys.handle(index, 0)}" in names


def test_reducers_get_the_key_of_a_signed_run(
    make_run: MakeRun, scripted: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_RUN_KEY", "sixteen bytes !!")
    make_run(reducers=1, signed=True)
    request = json.loads((scripted.directory / "R0.0.json").read_text())["request"]
    assert request["secrets"] == ["DILOCO_RUN_KEY"]


def test_a_run_is_launched_though_its_reducers_are_not(
    make_run: MakeRun, scripted: ScriptedExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    (scripted.directory / "refuse.R1").touch()
    with caplog.at_level(logging.WARNING):
        run = make_run(reducers=2)
    assert "the run goes on without its reducers" in caplog.text
    assert run.status().state == "running"
    assert _states(run) == ["cancelled", "failed"]
    # Each is tried on its own from then on, so that one without a machine keeps nobody back.
    _beat(run, 0, reducer=False)
    _look(run, _reducers(run))
    assert _states(run) == ["running", "failed"]


def test_a_launch_that_is_interrupted_at_its_reducers_leaves_nothing(
    make_run: MakeRun, scripted: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ScriptedExecutor.set

    def interrupted(self: ScriptedExecutor, rank: int | str, attempt: int = 0, **to: Any) -> None:
        write(self, rank, attempt, **to)
        if rank == "R1":  # the provider has it, and nobody has its id
            raise KeyboardInterrupt

    monkeypatch.setattr(ScriptedExecutor, "set", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_run(reducers=2)
    names = ("0.0", "1.0", "R0.0", "R1.0")
    lives = [json.loads((scripted.directory / f"{name}.json").read_text()) for name in names]
    assert [life["state"] for life in lives] == ["cancelled"] * 4


def test_status_counts_those_that_give_signs_of_life(
    make_run: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_run(reducers=3)
    assert (run.status().reducers, run.status().reducers_alive) == (3, 0)
    for index in range(2):
        _beat(run, index)
    assert run.status().reducers_alive == 2
    run.store.create(f"{keys.REDUCERS}/{keys.outcome(1, 0)}", b"{}")
    assert run.status().reducers_alive == 1


def test_reducers_have_no_part_in_the_runs_state(
    make_run: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_run(reducers=1)
    scripted.set("R0", state="failed", exit_code=1)
    assert run.status().state == "running"
    for rank in range(2):
        scripted.set(rank, **DONE)
    assert run.status().state == "succeeded"


def test_a_supervisor_starts_a_lost_reducer_again(
    make_run: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_run(reducers=2)
    events: list[Event] = []
    reducers = _reducers(run, on_event=events.append)
    scripted.set("R1", **KILLED)
    _look(run, reducers)
    assert scripted.launched_as("R") == [(0, 0), (1, 0)]  # nobody is there to reduce for
    _beat(run, 0, reducer=False)
    _look(run, reducers)
    assert scripted.launched_as("R") == [(0, 0), (1, 0), (1, 1)]
    _look(run, reducers)
    assert [(event.kind, event.rank) for event in events] == [("died", None), ("restarted", None)]
    assert events[1].text == "reducer 1 is started again, as attempt 1"
    assert scripted.launched == [(0, 0), (1, 0)]


def test_a_reducer_that_serves_nothing_is_given_up_in_the_end(
    make_run: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_run(reducers=1, max_restarts=2, heartbeat=10_000.0)
    _beat(run, 0, reducer=False)
    scripted.decide("R0", **KILLED)
    scripted.set("R0", **KILLED)
    reducers = _reducers(run)
    for _ in range(8):
        _look(run, reducers)
        clock.sleep(20.0)
    assert scripted.launched_as("R") == [(0, 0), (0, 1), (0, 2)]
    # One that had served a round would have been started again.
    _beat(run, 0, attempt=2, served=1)
    _look(run, _reducers(run))
    assert scripted.launched_as("R")[-1] == (0, 3)


def test_reducers_that_the_launcher_did_not_live_to_start_are_started(
    make_run: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_run(reducers=2, heartbeat=100.0)
    run.store.delete_many([info.key for info in run.store.list(f"{keys.REDUCERS}/")])
    (scripted.directory / "startsR").unlink()
    _beat(run, 0, reducer=False)
    reducers = _reducers(run)
    _look(run, reducers)
    assert scripted.launched_as("R") == []  # he may be at it
    clock.sleep(61.0)
    _look(run, reducers)
    assert scripted.launched_as("R") == [(0, 0), (1, 0)]


def test_supervision_ends_with_the_run_and_ends_its_reducers(
    make_run: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_run(reducers=1)
    for rank in range(2):
        scripted.set(rank, **DONE)
    assert run.supervise(interval=0.01).state == "succeeded"
    assert _states(run) == ["cancelled"]


def test_cancel_stops_reducers_too(make_run: MakeRun, scripted: ScriptedExecutor) -> None:
    run = make_run(reducers=2)
    run.cancel([0])
    assert _states(run) == ["running", "running"]
    assert run.cancel() == [1]
    assert _states(run) == ["cancelled", "cancelled"]
    assert run.status().state == "cancelled"


def test_cancel_finds_reducers_whose_launcher_died_before_it_could_say_so(
    make_run: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_run(reducers=1)
    run.store.delete(f"{keys.REDUCERS}/{keys.handle(0, 0)}")
    run.cancel()
    values = json.loads((scripted.directory / "R0.0.json").read_text())
    assert values["state"] == "cancelled"


def test_resume_starts_reducers_again(make_run: MakeRun, scripted: ScriptedExecutor) -> None:
    run = make_run(reducers=2)
    run.cancel()
    assert run.resume() == [0, 1]
    assert scripted.launched_as("R") == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert _states(run) == ["running", "running"]


def test_down_waits_for_reducers_and_leaves_nothing(
    make_run: MakeRun, scripted: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(reducers=1)
    run.cancel([0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(ScriptedExecutor, "cancel", lambda *_: None)
        with pytest.raises(DilocoError, match=r"reducers \[0\] of run-1 have not ended"):
            run.down(timeout=5.0)
    assert run.down() > 0
    assert run.store.list() == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reducers": -1}, "reducers is -1"),
        ({"reducers": 65}, "reducers is 65"),
        ({"reducers": 1.5}, "reducers is 1.5"),
        ({"reducers": 2, "reduction": "all-gather"}, "2 reducers would have nothing to do"),
    ],
)
def test_reducers_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunSpec(run_id="run-1", **settings)


def test_reducers_are_not_exported(trainer: str) -> None:
    spec = RunSpec(run_id="run-1", trainer=trainer, reducers=1)
    with pytest.raises(UsageError, match="only replicas are"):
        export_request(spec, "s3://bucket/runs")
