"""The rules: which ends are mended by a restart, how soon, and what a run's state makes of them."""

from __future__ import annotations

import pytest

from diloco_cloud.executor import ReplicaStatus
from diloco_cloud.run.restart import is_restartable, restart_delay, stale_after
from diloco_cloud.run.status import ReplicaView, counted_states, is_over, run_state
from diloco_cloud.run.views import Evidence, view_replica


@pytest.mark.parametrize(
    ("reason", "exit_code", "outcome", "expected"),
    [
        ("preempted", 143, {"reason": "preempted"}, True),
        ("lost", None, None, True),
        ("no_capacity", None, None, True),
        ("timeout", 143, {"reason": "preempted"}, True),
        ("out_of_memory", -9, None, True),
        ("exit_code", -9, None, True),
        ("exit_code", 137, None, True),
        ("exit_code", 1, {"restartable": True}, True),
        # errors of its own
        ("exit_code", 1, None, False),
        ("exit_code", 2, None, False),
        ("exit_code", 255, None, False),
        ("exit_code", 1, {"restartable": False}, False),
        ("exit_code", 1, {"restartable": "yes"}, False),
        ("out_of_memory", 1, {"reason": "out_of_memory", "restartable": False}, False),
        ("out_of_memory", -9, {"reason": "exit_code", "restartable": False}, True),
        ("exit_code", 130, {"error": "KeyboardInterrupt"}, False),
        (None, None, None, False),
    ],
)
def test_is_restartable_tells_the_machines_doing_from_the_trainers(
    reason: str | None, exit_code: int | None, outcome: dict[str, object] | None, expected: bool
) -> None:
    assert is_restartable(reason, exit_code, outcome) is expected


def test_restart_delay_grows_and_is_bounded() -> None:
    assert [restart_delay(n, "lost") for n in (1, 2, 3, 4)] == [0, 10, 20, 40]
    assert [restart_delay(n, "no_capacity") for n in (1, 2, 3)] == [0, 60, 120]
    assert restart_delay(100, "no_capacity") == restart_delay(100, "lost") == 600


@pytest.mark.parametrize(("heartbeat", "stale"), [(5.0, 60.0), (30.0, 360.0), (0.1, 5.0)])
def test_stale_after_follows_the_heartbeat(heartbeat: float, stale: float) -> None:
    assert stale_after(heartbeat) == stale


def _view(state: str, **values: object) -> ReplicaView:
    return ReplicaView(rank=0, attempt=0, state=state, **values)  # type: ignore[arg-type]


DEAD = _view("failed", restartable=True)


@pytest.mark.parametrize(
    ("views", "over", "supervised", "expected"),
    [
        ([_view("succeeded"), DEAD], False, False, "failed"),
        ([_view("succeeded"), DEAD], True, False, "succeeded"),
        ([DEAD, DEAD], True, False, "succeeded"),
        ([_view("succeeded"), _view("failed")], True, False, "failed"),
        ([DEAD, DEAD], False, True, "pending"),
        ([_view("failed", restartable=True, given_up="why")], False, True, "failed"),
        ([_view("failed")], False, True, "failed"),
        # retired replicas count while they run
        ([_view("succeeded"), _view("failed", retired=True)], False, False, "succeeded"),
        ([_view("succeeded"), _view("cancelled", retired=True)], False, False, "succeeded"),
        ([_view("succeeded"), _view("unknown", retired=True)], False, False, "succeeded"),
        ([_view("succeeded"), _view("running", retired=True)], False, False, "running"),
    ],
)
def test_counted_states_of_dead_and_retired_replicas(
    views: list[ReplicaView], over: bool, supervised: bool, expected: str
) -> None:
    assert run_state(counted_states(views, over=over, supervised=supervised)) == expected


@pytest.mark.parametrize(
    ("states", "manifest", "rounds", "expected"),
    [
        (["running"], None, 10, False),
        (["succeeded"], None, 10, False),  # it died while it wrote the result
        (["running"], {"round": 10}, 10, True),
        (["running"], {"round": 12}, 10, True),  # two rounds were discarded
        (["running"], {"round": 7}, 10, False),
        (["succeeded"], {"round": 7}, 10, True),  # they stopped early
        (["running"], {"round": 7}, None, True),
        (["running"], {}, 10, False),
    ],
)
def test_is_over_needs_a_result(
    states: list[str], manifest: dict[str, int] | None, rounds: int | None, expected: bool
) -> None:
    views = [*map(_view, states), DEAD, _view("failed", retired=True)]
    assert is_over(views, manifest, rounds) is expected


def test_a_dead_replica_that_is_cancelled_counts_as_cancelled() -> None:
    dead = Evidence(rank=0, polled=ReplicaStatus("failed", reason="preempted"))
    assert view_replica(dead).restartable
    cancelled = Evidence(rank=0, polled=dead.polled, cancel_requested=True)
    view = view_replica(cancelled)
    assert (view.state, view.restartable) == ("cancelled", False)


def test_a_replica_that_nobody_can_ask_is_lost_in_the_end() -> None:
    def state(launched: bool, age: float) -> tuple[str, str | None]:
        view = view_replica(
            Evidence(rank=0, launched=launched, heartbeat={}, heartbeat_age_s=age, stale_s=60.0)
        )
        return view.state, view.reason

    assert state(launched=False, age=59) == ("running", None)
    assert state(launched=False, age=599) == ("unknown", None)
    assert state(launched=False, age=601) == ("failed", "lost")
    assert state(launched=True, age=9999) == ("unknown", None)  # its handle may answer yet
