"""Replicas that live and stand still: seen, ended and started again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from manual_clock import Clock
from replica_writer import ReplicaWriter
from run_fixtures import reopen
from scripted_executor import ScriptedExecutor

from diloco_cloud import keys
from diloco_cloud.errors import ConfigError, LaunchError
from diloco_cloud.run import Run, RunSpec
from diloco_cloud.run.hang import is_hung
from diloco_cloud.run.restarter import Event
from diloco_cloud.run.status import ReplicaView

MakeRun = Callable[..., Run]
DONE: dict[str, Any] = {"state": "succeeded", "exit_code": 0}


def _told(events: list[Event]) -> list[tuple[str, int | None, int | None]]:
    return [(event.kind, event.rank, event.attempt) for event in events]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"idle_s": 299.9}, False),
        ({"idle_s": None}, False),  # of a version that does not tell
        ({"phase": "syncing"}, False),
        ({"phase": "joining"}, False),
        ({"phase": "starting"}, False),
        ({"phase": "finishing"}, False),
        ({"phase": "handing over"}, False),
        ({"alive": False}, False),  # what it was doing when it was last heard of is long ago
        ({"retired": True}, False),
        ({"waiting_for": (1,)}, True),  # by an exchange beside its training
    ],
)
def test_is_hung_asks_for_steps_of_who_lives_and_trains(
    changed: dict[str, Any], expected: bool
) -> None:
    values = {"phase": "training", "alive": True, "idle_s": 300.0, **changed}
    assert is_hung(ReplicaView(rank=0, attempt=0, state="running", **values), 300.0) is expected


def test_supervise_ends_a_hung_replica_and_starts_it_again(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_clocked(replicas=2, hang_timeout=300.0)
    slow, hung = (ReplicaWriter(run.store, rank) for rank in range(2))
    seen = []

    def beat(idle_s: float) -> Callable[[], None]:
        def write() -> None:
            seen.append(scripted.launched)
            slow.beat(idle_s=299.0)
            hung.beat(idle_s=idle_s)

        return write

    clock.scheduled = [beat(200.0), beat(299.0), beat(301.0), lambda: None, lambda: None]
    scripted.decide(1, 1, **DONE)
    clock.scheduled += [lambda: scripted.set(0, **DONE)]
    events: list[Event] = []
    status = run.supervise(on_event=events.append)
    assert status.state == "succeeded"
    assert seen[-1] == [(0, 0), (1, 0)]  # not before its time
    assert _told(events) == [("hung", 1, 0), ("died", 1, 0), ("restarted", 1, 1)]
    assert events[0].text == "replica 1 lives and has made no step for 5m 1s; it is ended"
    assert events[1].text == ("replica 1 ended: hung: no step for 5m 1s; restart 1 of 3 in a row")
    view = run.status().replicas[1]
    assert (view.attempt, view.restarted_after) == (1, "hung: no step for 5m 1s")


def test_a_replica_that_hangs_in_every_life_is_given_up(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_clocked(replicas=2, hang_timeout=300.0, max_restarts=1)

    def hang(attempt: int) -> Callable[[], None]:
        return lambda: ReplicaWriter(run.store, 1, attempt).beat(idle_s=400.0)

    clock.scheduled = [hang(0), lambda: None, lambda: None, hang(1), lambda: None, lambda: None]
    clock.scheduled += [lambda: scripted.set(0, **DONE)]
    events: list[Event] = []
    status = run.supervise(on_event=events.append)
    assert status.state == "failed"
    assert _told(events) == [
        *(("hung", 1, 0), ("died", 1, 0), ("restarted", 1, 1)),
        *(("hung", 1, 1), ("given_up", 1, 1)),
    ]
    view = status.replicas[1]
    assert (view.reason, view.error) == ("hung", "no step for 6m 40s")
    assert view.given_up == "1 restart in a row, none of which got into a round"


def test_what_a_hung_replica_says_of_its_end_is_not_why_it_ended(
    make_clocked: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_clocked(replicas=1)
    run.store.create(keys.hung(0, 0), b'{"reason": "hung", "error": "no step for 31m"}')
    ReplicaWriter(run.store, 0).end("failed", error="preempted", restartable=True, exit_code=143)
    for told in ("cancelled", "failed", "unknown"):
        scripted.set(0, state=told)
        view = reopen(run.store, Clock(0.0)).status().replicas[0]
        assert (view.state, view.reason, view.restartable) == ("failed", "hung", True), told
        assert view.error == "no step for 31m"


def test_a_hung_replica_that_a_user_cancels_is_cancelled(
    make_clocked: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_clocked(replicas=1)
    run.store.create(keys.hung(0, 0), b'{"reason": "hung", "error": "no step for 31m"}')
    run.cancel()
    view = run.status().replicas[0]
    assert (view.state, view.restartable) == ("cancelled", False)


def test_a_replica_that_wakes_up_in_time_has_done_its_work(
    make_clocked: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_clocked(replicas=1)
    run.store.create(keys.hung(0, 0), b'{"reason": "hung", "error": "no step for 31m"}')
    scripted.set(0, **DONE)
    assert run.status().replicas[0].state == "succeeded"


@pytest.mark.parametrize("settings", [{"hang_timeout": None}, {"max_restarts": 0}])
def test_nothing_is_ended_that_the_run_does_not_ask_for(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock, settings: dict[str, Any]
) -> None:
    run = make_clocked(replicas=1, **settings)
    ReplicaWriter(run.store, 0).beat(idle_s=10_000.0)
    clock.scheduled = [lambda: None, lambda: scripted.set(0, **DONE)]
    events: list[Event] = []
    assert run.supervise(on_event=events.append).state == "succeeded"
    assert events == []


def test_an_executor_that_cannot_end_it_now_is_asked_again(
    make_clocked: MakeRun,
    scripted: ScriptedExecutor,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make_clocked(replicas=1, hang_timeout=300.0)
    asked = []

    def cancel(self: ScriptedExecutor, handle: object) -> None:
        asked.append(clock.now)
        if len(asked) == 1:
            raise LaunchError("the provider is away")
        scripted.set(0, state="cancelled", reason="cancelled")

    monkeypatch.setattr(ScriptedExecutor, "cancel", cancel)
    scripted.decide(0, 1, **DONE)
    clock.scheduled = [lambda: ReplicaWriter(run.store, 0).beat(idle_s=400.0)] * 30
    events: list[Event] = []
    assert run.supervise(on_event=events.append, interval=5.0).state == "succeeded"
    assert [kind for kind, _, _ in _told(events)] == ["hung", "trouble", "died", "restarted"]
    assert events[1].text.endswith("cannot be ended from here: the provider is away")
    assert asked[1] - asked[0] == 60


def test_status_tells_that_the_others_wait_for_one_that_stands_still(
    make_clocked: MakeRun,
) -> None:
    run = make_clocked(replicas=2)
    ReplicaWriter(run.store, 0).beat(state="syncing", waiting_for=[1], idle_s=700.0)
    ReplicaWriter(run.store, 1).beat(idle_s=720.0)
    status = run.status()
    why = "the others wait for it; it is training, and has made no step for 12m"
    assert status.missing == ((1, why),)
    assert status.replicas[1].idle_s == 720.0


@pytest.mark.parametrize("hang_timeout", [0, -1.0, float("nan")])
def test_a_hang_timeout_that_is_no_time_is_refused(hang_timeout: float) -> None:
    with pytest.raises(ConfigError, match="hang_timeout"):
        RunSpec(run_id="run-1", hang_timeout=hang_timeout)


def test_a_run_with_the_default_has_the_digest_of_one_before_there_were_any() -> None:
    assert "hang_timeout" not in RunSpec(run_id="run-1").to_json()
    for timeout in (None, 60.0):
        spec = RunSpec(run_id="run-1", hang_timeout=timeout)
        assert RunSpec.from_json(spec.to_json()) == spec
