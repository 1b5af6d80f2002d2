"""The supervisor, on a backend that does as it is told and a clock that only sleep moves."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from clocked_store import ClockedStore
from manual_clock import Clock
from replica_writer import ReplicaWriter
from run_fixtures import reopen
from scripted_executor import ScriptedExecutor

from diloco_cloud import keys
from diloco_cloud.errors import RunNotFoundError, UnknownBackendError, UnreachableError
from diloco_cloud.executor import LaunchOptions
from diloco_cloud.run import Run
from diloco_cloud.run.intents import Start, announce
from diloco_cloud.run.restarter import Event
from diloco_cloud.store.base import ObjectStore

MakeRun = Callable[..., Run]
KILLED: dict[str, Any] = {"state": "failed", "exit_code": -9, "message": "killed by SIGKILL"}
DONE: dict[str, Any] = {"state": "succeeded", "exit_code": 0}


class Events(list[Event]):
    """What a supervisor told, and the clock when it did."""

    def tell(self, event: Event) -> None:
        self.append(event)

    @property
    def kinds(self) -> list[tuple[str, int | None, int | None]]:
        return [(event.kind, event.rank, event.attempt) for event in self]


@pytest.fixture
def events() -> Events:
    return Events()


def _commit(store: ObjectStore, round_: int, *lives: tuple[int, int], **more: object) -> None:
    values = {
        "round": round_,
        "decision": "commit",
        "contributors": [{"rank": rank, "attempt": attempt} for rank, attempt in lives],
        **more,
    }
    store.create(keys.commit(round_, 0), json.dumps(values).encode())


def test_supervise_starts_a_killed_replica_again_with_its_rank(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock, events: Events
) -> None:
    run = make_clocked(replicas=3)
    scripted.set(1, **KILLED)
    clock.scheduled = [
        lambda: scripted.set(1, 1, **DONE),
        lambda: [scripted.set(rank, **DONE) for rank in (0, 2)],
    ]
    status = run.supervise(on_event=events.tell)
    assert status.state == "succeeded"
    assert events.kinds == [("died", 1, 0), ("restarted", 1, 1)]
    assert events[0].text == (
        "replica 1 ended: exit code -9: killed by SIGKILL; restart 1 of 3 in a row"
    )
    request = json.loads((scripted.directory / "1.1.json").read_text())["request"]
    assert (request["attempt"], request["world_size"]) == (1, 3)
    assert scripted.launched == [(0, 0), (1, 0), (1, 1), (2, 0)]
    view = run.status().replicas[1]
    assert (view.attempt, view.restarts) == (1, 1)
    assert view.restarted_after == "exit code -9: killed by SIGKILL"


def test_supervise_leaves_errors_of_the_trainer_alone(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock, events: Events
) -> None:
    run = make_clocked()
    ReplicaWriter(run.store, 0).end("failed", error="ValueError: boom", restartable=False)
    scripted.set(0, state="failed", exit_code=1, message="ValueError: boom")
    clock.scheduled = [lambda: None, lambda: scripted.set(1, **DONE)]
    assert run.supervise(on_event=events.tell).state == "failed"
    assert events.kinds == [("given_up", 0, 0)]
    assert "ValueError: boom; not started again: it would only happen again" in events[0].text
    assert scripted.launched == [(0, 0), (1, 0)]


def test_supervise_asks_the_outcome_where_the_exit_code_does_not_tell(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_clocked()
    ReplicaWriter(run.store, 0).end("failed", error="RoundTimeoutError: late", restartable=True)
    scripted.set(0, state="failed", exit_code=1)
    scripted.decide(0, 1, **DONE)
    clock.scheduled = [lambda: scripted.set(1, **DONE)]
    assert run.supervise().state == "succeeded"


def test_supervise_stops_a_crash_loop_and_tells_why_while_others_go_on(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock, events: Events
) -> None:
    run = make_clocked(max_restarts=3)
    scripted.set(1, **KILLED)
    scripted.decide(1, **KILLED)
    began = clock.now
    clock.scheduled = [lambda: None] * 20 + [lambda: scripted.set(0, **DONE)]
    status = run.supervise(on_event=events.tell, interval=5.0)
    assert status.state == "failed"
    assert scripted.launched == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]
    starts = [event.time - began for event in events if event.kind == "restarted"]
    assert starts == [0, 15, 40]  # at once, 10 s and 20 s after it was seen dead again
    assert events.kinds[-1] == ("given_up", 1, 3)
    view = status.replicas[1]
    assert view.given_up == "3 restarts in a row, none of which got into a round"
    assert view.given_up in events[-1].text


def test_supervise_counts_anew_once_a_replica_got_into_a_round(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock, events: Events
) -> None:
    run = make_clocked(max_restarts=1)
    scripted.set(1, **KILLED)

    def die_after_a_round() -> None:
        _commit(run.store, 0, (0, 0), (1, 1))
        scripted.set(1, 1, **KILLED)

    clock.scheduled = [die_after_a_round, lambda: scripted.set(1, 2, **KILLED)]
    clock.scheduled += [lambda: scripted.set(0, **DONE)]
    assert run.supervise(on_event=events.tell).state == "failed"
    assert [kind for kind, *_ in events.kinds] == [
        *("died", "restarted", "died", "restarted", "given_up")
    ]
    assert scripted.launched[-1] == (1, 2)


def test_supervise_finds_progress_in_rounds_that_are_no_longer_kept(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_clocked(max_restarts=1)
    standing = [{"rank": 1, "attempt": 1, "round": 3, "position": 9}]
    _commit(run.store, 7, (0, 0), standings=standing)
    scripted.set(1, **KILLED)
    clock.scheduled = [lambda: scripted.set(1, 1, **KILLED), lambda: scripted.set(1, 2, **DONE)]
    clock.scheduled += [lambda: scripted.set(0, **DONE)]
    assert run.supervise().state == "succeeded"


def test_supervise_counts_anew_after_a_user_resumed(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock, events: Events
) -> None:
    run = make_clocked(max_restarts=1)
    scripted.set(1, **KILLED)
    scripted.decide(1, 1, **KILLED)
    clock.scheduled = [lambda: None, lambda: run.cancel([0])]
    run.supervise(on_event=events.tell)
    assert events.kinds[-1] == ("given_up", 1, 1)
    assert run.resume([1]) == [1]
    scripted.set(1, 2, **KILLED)
    clock.scheduled = [lambda: scripted.set(1, 3, **DONE)]
    assert run.supervise(on_event=events.tell).state == "succeeded"


def test_supervise_waits_for_capacity_and_counts_that(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock, events: Events
) -> None:
    run = make_clocked()
    scripted.set(1, state="failed", reason="preempted", message="spot")
    refusal = scripted.directory / "refuse.1"
    refusal.touch()
    began = clock.now
    clock.scheduled = [lambda: None] * 3 + [refusal.unlink]
    scripted.decide(1, 2, **DONE)
    clock.scheduled += [lambda: None] * 10 + [lambda: scripted.set(0, **DONE)]
    assert run.supervise(on_event=events.tell, interval=10.0).state == "succeeded"
    assert [kind for kind, *_ in events.kinds] == ["died", "refused", "died", "restarted"]
    assert "out of capacity" in events[1].text
    assert "no capacity: the launch failed: out of capacity; restart 2 of 3" in events[2].text
    assert events[3].time - began == 70  # a minute after it was seen
    assert scripted.launched == [(0, 0), (1, 0), (1, 2)]  # attempt 1 was never there


@pytest.mark.parametrize("state", ["unknown", "pending", "cancelled"])
def test_supervise_starts_nothing_that_is_not_known_to_have_failed(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock, state: str
) -> None:
    run = make_clocked()
    scripted.set(1, state=state)
    clock.scheduled = [lambda: None] * 5
    clock.scheduled += [lambda: [scripted.set(rank, **DONE) for rank in range(2)]]
    assert run.supervise(interval=60.0).state == "succeeded"
    assert scripted.launched == [(0, 0), (1, 0)]


def test_supervise_with_no_restarts_allowed_only_waits(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock, events: Events
) -> None:
    run = make_clocked(max_restarts=0)
    scripted.set(1, **KILLED)
    clock.scheduled = [lambda: None, lambda: scripted.set(0, **DONE)]
    assert run.supervise(on_event=events.tell).state == "failed"
    assert events == []
    assert scripted.launched == [(0, 0), (1, 0)]


def test_supervise_may_be_given_another_limit(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_clocked(max_restarts=0)
    scripted.set(1, **KILLED)
    scripted.decide(1, **DONE)
    clock.scheduled = [lambda: scripted.set(0, **DONE)]
    assert run.supervise(max_restarts=1).state == "succeeded"


def test_supervise_does_not_start_what_was_lost_after_the_result_was_there(
    make_clocked: MakeRun, scripted: ScriptedExecutor, events: Events
) -> None:
    run = make_clocked(rounds=4)
    scripted.set(0, **DONE)
    scripted.set(1, state="failed", reason="lost")
    run.store.put(keys.result(4, "ab") + keys.RESULT_MANIFEST, b'{"round": 4, "step": 4}')
    status = run.supervise(on_event=events.tell)
    assert (status.state, status.over) == ("succeeded", True)
    assert events.kinds == [("given_up", 1, 0)]
    assert "the run's result is there" in events[0].text


def test_supervise_starts_the_last_one_again_where_the_result_is_still_to_be_written(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_clocked(rounds=4)
    scripted.set(0, **DONE)
    scripted.set(1, **KILLED)
    scripted.decide(1, 1, **DONE)
    assert run.supervise().state == "succeeded"
    assert scripted.launched[-1] == (1, 1)


def test_two_supervisors_start_one_life(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock, events: Events
) -> None:
    run = make_clocked(replicas=4)
    for rank in range(4):
        scripted.set(rank, **KILLED)
    scripted.decide(**DONE)
    runs = [run, *(reopen(run.store, clock) for _ in range(3))]
    together = threading.Barrier(len(runs))
    ends = []

    def supervise(mine: Run) -> None:
        together.wait()
        ends.append(mine.supervise(on_event=events.tell).state)

    threads = [threading.Thread(target=supervise, args=(one,)) for one in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ends == ["succeeded"] * 4
    assert scripted.launched == [(rank, attempt) for rank in range(4) for attempt in range(2)]
    restarted = [event.rank for event in events if event.kind == "restarted"]
    assert sorted(restarted, key=str) == [0, 1, 2, 3]


def test_supervisors_that_saw_the_same_start_one_life(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock, events: Events
) -> None:
    run = make_clocked(replicas=1)
    scripted.set(0, **KILLED)
    runs = [run, *(reopen(run.store, clock) for _ in range(2))]
    looks = [(one.supervisor(on_event=events.tell), one.status()) for one in runs]
    for supervisor, status in looks:
        assert supervisor.look(status)
    assert scripted.launched == [(0, 0), (0, 1)]
    assert [event.kind for event in events].count("restarted") == 1


def _announce(run: Run, clock: Clock, rank: int, attempt: int) -> Start:
    """As a supervisor does that is killed before it starts anything."""
    start = Start(
        ranks=[rank], attempt=attempt, backend="scripted", world_size=2, by="supervisor", in_a_row=1
    )
    assert announce(run.store, start, at=clock.now) == [rank]
    return start


def test_supervise_takes_over_from_one_that_died_half_way(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock, events: Events
) -> None:
    run = make_clocked()
    scripted.set(1, **KILLED)
    _announce(run, clock, rank=1, attempt=1)
    began = clock.now
    scripted.decide(1, **DONE)
    clock.scheduled = [lambda: None] * 10 + [lambda: scripted.set(0, **DONE)]
    assert run.supervise(on_event=events.tell, interval=10.0).state == "succeeded"
    assert scripted.launched == [(0, 0), (1, 0), (1, 2)]  # never the announced one
    assert [event.time - began for event in events if event.kind == "restarted"] == [70]


def test_supervise_leaves_a_start_alone_that_is_still_being_worked_at(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_clocked()
    scripted.set(1, **KILLED)
    start = _announce(run, clock, rank=1, attempt=1)

    def renew() -> None:
        run.store.put(keys.intent(1, 1), json.dumps(start.intent(1, clock.now)).encode())

    clock.scheduled = [renew] * 10 + [lambda: [run.cancel(), scripted.set(0, **DONE)]]
    run.supervise(interval=30.0)
    assert scripted.launched == [(0, 0), (1, 0)]


def test_supervise_waits_for_a_life_that_lives_without_a_handle(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_clocked()
    scripted.set(1, **KILLED)
    _announce(run, clock, rank=1, attempt=1)
    writer = ReplicaWriter(run.store, 1, attempt=1)
    clock.scheduled = [writer.beat] * 10
    clock.scheduled += [lambda: [writer.end(), scripted.set(0, **DONE)]]
    assert run.supervise(interval=30.0).state == "succeeded"
    assert scripted.launched == [(0, 0), (1, 0)]


def test_supervise_starts_what_a_killed_launcher_did_not(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_clocked()
    run.store.delete(keys.handle(1, 0))
    clock.now += 61
    scripted.decide(1, **DONE)
    clock.scheduled = [lambda: scripted.set(0, **DONE)]
    assert run.supervise().state == "succeeded"
    assert scripted.launched == [(0, 0), (1, 0), (1, 1)]


def test_cancel_of_a_dead_replica_keeps_it_dead(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_clocked()
    scripted.set(1, **KILLED)
    scripted.decide(1, 1, **KILLED)  # the next restart is 10 s away when the run is cancelled
    clock.scheduled = [lambda: None, lambda: reopen(run.store, clock).cancel()]
    assert run.supervise().state == "cancelled"
    assert scripted.launched == [(0, 0), (1, 0), (1, 1)]


def test_cancel_that_meets_a_restart_wins(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    """Whichever of the two is a moment earlier."""
    run = make_clocked(replicas=1)
    store = run.store
    assert isinstance(store, ClockedStore)
    scripted.set(0, **KILLED)

    def cancel_before_the_intent(key: str) -> None:
        if key == keys.intent(0, 1):
            store.before_create = lambda _key: None
            reopen(store, clock).cancel()

    store.before_create = cancel_before_the_intent
    assert run.supervise().state == "cancelled"
    assert scripted.launched == [(0, 0)]


@pytest.mark.parametrize("far", ["announced", "started"])
def test_cancel_that_is_met_by_a_restart_wins(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock, far: str
) -> None:
    run = make_clocked(replicas=1)
    store = run.store
    assert isinstance(store, ClockedStore)
    scripted.set(0, **KILLED)

    def restart_before_the_wish(key: str) -> None:
        if key == keys.cancel(0, 0):
            store.before_create = lambda _key: None
            if far == "announced":
                _announce(run, clock, rank=0, attempt=1)
            else:
                other = reopen(store, clock)
                assert other.supervisor().look(other.status())

    store.before_create = restart_before_the_wish
    assert run.cancel() == [0]
    assert scripted.launched == [(0, 0), (0, 1)][: 1 if far == "announced" else 2]
    assert run.store.head(keys.cancel(0, 1))
    assert run.status().state == "cancelled"


def test_cancel_during_a_start_ends_what_was_started(
    make_clocked: MakeRun, clock: Clock, scripted: ScriptedExecutor
) -> None:
    run = make_clocked(replicas=1)
    scripted.set(0, **KILLED)

    class Cancelled(ScriptedExecutor):
        def launch_replicas(self, *args: Any, options: LaunchOptions, **kwargs: Any) -> Any:
            assert reopen(run.store, clock).cancel() == [0]
            return super().launch_replicas(*args, options=options, **kwargs)

    record = run._record
    mine = Run(run.store, record, executor=Cancelled(), clock=clock.time, sleep=clock.sleep)
    assert mine.supervise().state == "cancelled"
    assert json.loads((scripted.directory / "0.1.json").read_text())["state"] == "cancelled"


def test_supervise_ends_when_the_run_is_deleted_and_leaves_no_ghost(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_clocked()
    clock.scheduled = [lambda: None, lambda: reopen(run.store, clock).down(cancel=True)]
    with pytest.raises(RunNotFoundError, match="has been deleted"):
        run.supervise()
    assert run.store.list("") == []


def test_supervise_without_the_backend_says_so_at_once(
    make_clocked: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: object, clock: Clock
) -> None:
    run = make_clocked()
    monkeypatch.setattr(sys, "path", [p for p in sys.path if str(tmp_path) not in p])
    with pytest.raises(UnknownBackendError):
        reopen(run.store, clock).supervise()


def test_supervise_outlives_a_store_that_is_out_of_reach(
    make_clocked: MakeRun,
    scripted: ScriptedExecutor,
    clock: Clock,
    events: Events,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make_clocked()
    listing = run.store.list

    def fail(prefix: str = "") -> Any:
        monkeypatch.setattr(run.store, "list", listing)
        raise UnreachableError("no route to host")

    clock.scheduled = [
        lambda: monkeypatch.setattr(run.store, "list", fail),
        lambda: [scripted.set(rank, **DONE) for rank in range(2)],
    ]
    assert run.supervise(on_event=events.tell).state == "succeeded"
    assert [event.kind for event in events] == ["trouble"]


def test_a_supervised_run_whose_replicas_all_died_has_not_ended_for_others(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_clocked()
    other = reopen(run.store, clock)
    for rank in range(2):
        scripted.set(rank, **KILLED)
        scripted.decide(rank, 1, **KILLED)
    seen = []
    clock.scheduled = [lambda: seen.append(other.status())] * 2
    clock.scheduled += [lambda: [scripted.decide(rank, 2, **DONE) for rank in range(2)]]
    assert run.supervise().state == "succeeded"
    assert [(status.state, status.supervised) for status in seen] == [("pending", True)] * 2
    assert other.status().supervised is False  # it has signed off


def test_a_supervisor_that_was_killed_counts_no_longer_after_a_minute(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_clocked()
    for rank in range(2):
        scripted.set(rank, **KILLED)
    run.store.put(keys.supervisor("dead"), b"{}")
    assert run.status().state == "pending"
    clock.now += 61
    assert run.status().state == "failed"
