"""What ``status`` makes of what is known."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from manual_clock import Clock
from replica_writer import ReplicaWriter
from scripted_executor import ScriptedExecutor

from diloco_cloud import keys
from diloco_cloud.executor import ReplicaStatus
from diloco_cloud.run import Run
from diloco_cloud.run.status import run_state
from diloco_cloud.run.views import Evidence, view_replica

MakeRun = Callable[..., Run]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["succeeded", "succeeded"], "succeeded"),
        (["running", "failed"], "running"),
        (["pending", "failed"], "pending"),
        (["unknown", "failed"], "unknown"),
        (["succeeded", "failed"], "failed"),
        (["cancelled", "failed"], "failed"),
        (["succeeded", "cancelled"], "succeeded"),
        (["cancelled", "cancelled"], "cancelled"),
    ],
)
def test_run_state_follows_the_table(states: list[str], expected: str) -> None:
    assert run_state(states) == expected
    assert run_state(states[::-1]) == expected


def _outcome(state: str, **values: object) -> dict[str, object]:
    return {"state": state, "exit_code": 1, "reason": "exit_code", "error": "E: boom", **values}


@pytest.mark.parametrize(
    ("evidence", "state", "reason"),
    [
        # poll decides where it answers
        (
            Evidence(rank=0, polled=ReplicaStatus("running"), outcome=_outcome("failed")),
            "running",
            None,
        ),
        (Evidence(rank=0, polled=ReplicaStatus("failed", exit_code=3)), "failed", "exit_code"),
        (
            Evidence(
                rank=0,
                polled=ReplicaStatus("failed", exit_code=-9, reason="out_of_memory"),
                outcome=_outcome("failed"),
            ),
            "failed",
            "out_of_memory",
        ),
        # a timeout is seen by the provider; the replica knows only that it was told to stop
        (
            Evidence(
                rank=0,
                polled=ReplicaStatus("failed", exit_code=143, reason="timeout"),
                outcome=_outcome("failed", reason="preempted", error=None),
            ),
            "failed",
            "timeout",
        ),
        # but a job that the provider has forgotten still has its own last word
        (
            Evidence(
                rank=0,
                polled=ReplicaStatus("failed", reason="lost"),
                outcome=_outcome("succeeded"),
            ),
            "succeeded",
            None,
        ),
        (Evidence(rank=0, polled=ReplicaStatus("failed", reason="lost")), "failed", "lost"),
        # a cancelled replica dies by a signal; one that failed by itself before does not
        (
            Evidence(rank=0, polled=ReplicaStatus("failed", exit_code=-15), cancel_requested=True),
            "cancelled",
            "cancelled",
        ),
        (
            Evidence(rank=0, polled=ReplicaStatus("failed", exit_code=1), cancel_requested=True),
            "failed",
            "exit_code",
        ),
        # nobody to ask
        (Evidence(rank=0, launched=True, outcome=_outcome("succeeded")), "succeeded", None),
        (Evidence(rank=0, launched=True, heartbeat={}, heartbeat_age_s=5.0), "running", None),
        (Evidence(rank=0, launched=True, heartbeat={}, heartbeat_age_s=500.0), "unknown", None),
        (Evidence(rank=0, launched=True), "unknown", None),
        (Evidence(rank=0, polled=ReplicaStatus("unknown"), launched=True), "unknown", None),
        # never launched
        (Evidence(rank=0), "pending", None),
        (Evidence(rank=0, cancel_requested=True), "cancelled", "cancelled"),
    ],
)
def test_view_replica_takes_the_best_evidence(
    evidence: Evidence, state: str, reason: str | None
) -> None:
    view = view_replica(evidence)
    assert (view.state, view.reason) == (state, reason)


def test_status_tells_round_phase_and_who_is_waited_for(make_run: MakeRun) -> None:
    run = make_run(replicas=3)
    ReplicaWriter(run.store, 0).beat(state="syncing", round=4, waiting_for=[1, 2], loss=2.5)
    ReplicaWriter(run.store, 1).beat(state="training", round=3, inner_step=17)
    status = run.status()
    assert (status.state, status.round) == ("running", 4)
    assert status.replicas[0].waiting_for == (1, 2)
    assert status.missing == (
        (1, "the others wait for it; it is training"),
        (2, "has not been heard from yet"),
    )


def test_status_reports_a_crash_with_exit_code_reason_and_log_tail(
    make_run: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_run()
    ReplicaWriter(run.store, 0).end("failed", exit_code=1, error="ValueError: boom")
    scripted.set(
        0, state="failed", exit_code=1, reason="exit_code", output="a\nb\nValueError: boom"
    )
    scripted.set(1, state="failed", exit_code=-9, reason="out_of_memory", message="killed")
    status = run.status()
    assert status.state == "failed"
    first, second = status.replicas
    assert (first.exit_code, first.reason, first.error) == (1, "exit_code", "ValueError: boom")
    assert first.log_tail == ("a", "b", "ValueError: boom")
    assert (second.exit_code, second.reason, second.error) == (-9, "out_of_memory", "killed")
    assert status.missing[0] == (0, "failed: ValueError: boom")


def test_status_counts_the_speed_of_those_that_get_on(
    make_run: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_run(replicas=3)
    writers = [ReplicaWriter(run.store, rank) for rank in range(3)]
    for writer in writers:
        writer.beat(tokens_per_s=100.0)
    assert run.status().tokens_per_s == 300.0
    scripted.set(2, state="failed", exit_code=-9)
    writers[0].beat(tokens_per_s=100.0, state="syncing", waiting_for=[1, 2])
    assert run.status().tokens_per_s == 100.0
    writers[1].beat(tokens_per_s=100.0, state="syncing", waiting_for=[2])
    assert run.status().tokens_per_s == 0.0
    run.resume()
    ReplicaWriter(run.store, 2, attempt=1).beat(state="starting")
    assert run.status().tokens_per_s == 0.0


def test_status_of_a_silent_replica_counts_no_speed(make_run: MakeRun, clock: Clock) -> None:
    run = make_run(replicas=1)
    ReplicaWriter(run.store, 0).beat(tokens_per_s=100.0)
    assert run.status().tokens_per_s == 100.0
    clock.now += 3600
    assert run.status().tokens_per_s == 0.0


def test_status_log_tail_ends_with_the_users_own_frames(
    make_run: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_run(replicas=1)
    frame = '  File "/site/{}.py", line 1, in f\n    call()\n    ^^^^^^\n'
    plumbing = ("executors/local/child", "diloco_cloud/replica_entrypoint")
    frames = [frame.format(name) for name in (*plumbing, "diloco_cloud/replica/trainer", "mine")]
    output = "working\nTraceback (most recent call last):\n" + "".join(frames) + "ValueError: boom"
    scripted.set(0, state="failed", exit_code=1, output=output)
    (view,) = run.status().replicas
    assert view.log_tail == (
        "working",
        "Traceback (most recent call last):",
        '  File "/site/mine.py", line 1, in f',
        "    call()",
        "    ^^^^^^",
        "ValueError: boom",
    )


def test_status_without_executor_falls_back_to_the_prefix(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    run = make_run(replicas=3)
    ReplicaWriter(run.store, 0).beat(round=2)
    ReplicaWriter(run.store, 1).end("failed", traceback="Traceback\nValueError: boom")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if str(tmp_path) not in p])
    elsewhere = Run.open(run.store_uri, run.run_id)
    status = elsewhere.status()
    assert [view.state for view in status.replicas] == ["running", "failed", "unknown"]
    assert status.replicas[1].log_tail == ("Traceback", "ValueError: boom")
    assert status.note == "there is no backend 'scripted'"


def test_status_by_a_wrong_clock_still_tells_a_live_replica(
    make_run: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_run(replicas=1)
    ReplicaWriter(run.store, 0).beat()
    scripted.set(0, state="unknown")
    clock.now += 7 * 3600  # this laptop's clock is seven hours ahead of the store's
    assert run.status().state == "running"


def test_status_ignores_the_heartbeat_of_an_earlier_life(
    make_run: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_run(replicas=1)
    ReplicaWriter(run.store, 0).beat(round=9)
    scripted.set(0, state="failed", exit_code=1)
    run.resume()
    view = run.status().replicas[0]
    assert (view.state, view.attempt, view.round) == ("running", 1, None)


def test_status_shows_the_last_commit(make_run: MakeRun) -> None:
    run = make_run()
    commit = (
        b'{"round": 0, "fragment": 0, "step": 1, "decision": "commit",'
        b' "contributors": [{"rank": 0}], "excluded": [{"rank": 1, "reason": "late"}]}'
    )
    run.store.create(f"{keys.ROUNDS}00000000.0/commit", commit)
    run.store.create(f"{keys.ROUNDS}00000001.0/put/0000.0000", b"open round")
    last = run.status().last_commit
    assert last is not None
    assert (last["round"], last["contributors"]) == (0, [0])
    assert last["excluded"] == [{"rank": 1, "reason": "late"}]
