"""Resume: more replicas, fewer, elsewhere, and not what somebody else is at."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from manual_clock import Clock
from replica_writer import ReplicaWriter
from run_fixtures import reopen
from scripted_executor import ElsewhereExecutor, ScriptedExecutor

from diloco_cloud import keys
from diloco_cloud.errors import UnknownBackendError, UsageError
from diloco_cloud.run import Run
from diloco_cloud.store import open_store

MakeRun = Callable[..., Run]
DONE = {"state": "succeeded", "exit_code": 0}
FAILED = {"state": "failed", "exit_code": 1}


@pytest.fixture
def elsewhere(scripted: ScriptedExecutor) -> ScriptedExecutor:
    """A second backend."""
    return ElsewhereExecutor()


def _request(executor: ScriptedExecutor, rank: int, attempt: int) -> dict[str, object]:
    values = json.loads((executor.directory / f"{rank}.{attempt}.json").read_text())
    request: dict[str, object] = values["request"]
    return request


def test_resume_with_more_replicas_grows_a_running_run(
    make_clocked: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_clocked(replicas=2)
    scripted.set(1, **FAILED)
    assert run.resume(replicas=4) == [1, 2, 3]
    assert scripted.launched == [(0, 0), (1, 0), (1, 1), (2, 1), (3, 1)]
    assert _request(scripted, 3, 1)["world_size"] == 4
    status = run.status()
    assert (status.size, status.state, len(status.replicas)) == (4, "running", 4)
    assert run.spec.replicas == 2  # the spec is what it was
    assert run.cancel([3]) == [3]
    with pytest.raises(UsageError, match=r"no replica 4.*\n.*replicas 0 to 3"):
        run.cancel([4])


def test_resume_starts_new_ranks_with_their_first_life(
    make_clocked: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_clocked(replicas=1)
    assert run.resume(replicas=2) == [1]
    assert scripted.launched == [(0, 0), (1, 0)]
    ReplicaWriter(run.store, 1).log("hello")
    scripted.set(0, **DONE)
    scripted.set(1, **DONE)
    assert [line.text for line in run.logs(ranks=[1])] == ["hello"]
    ReplicaWriter(run.store, 1).end(result=7)
    assert run.results().returned == [None, 7]


def test_resume_with_fewer_replicas_retires_the_others(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_clocked(replicas=4)
    run.cancel()
    assert run.resume(replicas=2) == [0, 1]
    assert _request(scripted, 1, 1)["world_size"] == 2
    status = run.status()
    assert [view.retired for view in status.replicas] == [False, False, True, True]
    assert status.size == 2
    assert [rank for rank, _ in status.missing] == [0, 1]  # they have not been heard from yet
    for rank in range(2):
        scripted.set(rank, 1, **DONE)
    assert run.status().state == "succeeded"
    with pytest.raises(UsageError, match="nothing to resume"):
        run.resume()


def test_a_retired_replica_that_failed_does_not_fail_the_run(
    make_clocked: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_clocked(replicas=3)
    scripted.set(2, **FAILED)
    assert run.resume(replicas=2) == []
    for rank in range(2):
        scripted.set(rank, **DONE)
    assert run.status().state == "succeeded"


def test_a_run_that_shrank_may_grow_again(
    make_clocked: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_clocked(replicas=3)
    run.cancel([2])
    assert run.resume(replicas=2) == []
    with pytest.raises(UsageError, match=r"replica 2 has retired.*\n.*--replicas 3"):
        run.resume([2])
    assert run.resume(replicas=3) == [2]
    assert [view.retired for view in run.status().replicas] == [False] * 3


def test_resume_does_not_retire_a_running_replica(make_clocked: MakeRun) -> None:
    run = make_clocked(replicas=3)
    with pytest.raises(
        UsageError, match=r"replicas \[2\].*have not ended\n.*cancel run-1 --replica"
    ):
        run.resume(replicas=2)
    assert run.status().size == 3


def test_resume_takes_ranks_or_their_number(make_clocked: MakeRun) -> None:
    run = make_clocked()
    with pytest.raises(UsageError, match="Use --replica to"):
        run.resume([0], replicas=3)
    with pytest.raises(UsageError, match="at least 1"):
        run.resume(replicas=0)


def test_resume_by_two_with_different_numbers_has_one_winner(
    make_clocked: MakeRun, clock: Clock
) -> None:
    run = make_clocked()

    def race(key: str) -> None:
        if key == keys.size(1):
            run.store.before_create = lambda _key: None  # type: ignore[attr-defined]
            reopen(run.store, clock).resume(replicas=3)

    run.store.before_create = race  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="just changed by someone else"):
        run.resume(replicas=4)
    assert run.status().size == 3


def test_resume_on_another_backend_asks_each_replicas_own(
    make_clocked: MakeRun, scripted: ScriptedExecutor, elsewhere: ScriptedExecutor, clock: Clock
) -> None:
    run = make_clocked(replicas=3)
    scripted.set(1, **FAILED)
    scripted.set(2, **FAILED)
    assert run.resume([1], backend="elsewhere") == [1]
    assert (scripted.launched, elsewhere.launched) == ([(0, 0), (1, 0), (2, 0)], [(1, 1)])
    elsewhere.set(1, 1, output="from elsewhere")
    again = reopen(run.store, clock)
    assert [view.backend for view in again.status().replicas] == [
        "scripted",
        "elsewhere",
        "scripted",
    ]
    assert [line.text for line in again.logs(ranks=[1])] == ["from elsewhere"]
    assert again.cancel() == [0, 1]
    assert again.status().state == "failed"
    # Each goes back to where it was.
    assert again.resume() == [0, 1, 2]
    assert elsewhere.launched == [(1, 1), (1, 2)]
    assert _request(elsewhere, 1, 2)["attempt"] == 2


def test_a_supervisor_restarts_a_replica_where_it_was(
    make_clocked: MakeRun, scripted: ScriptedExecutor, elsewhere: ScriptedExecutor, clock: Clock
) -> None:
    run = make_clocked()
    run.cancel([1])
    run.resume([1], backend="elsewhere")
    elsewhere.set(1, 1, state="failed", reason="preempted")
    elsewhere.decide(**DONE)
    clock.scheduled = [lambda: scripted.set(0, **DONE)]
    assert run.supervise().state == "succeeded"
    assert elsewhere.launched == [(1, 1), (1, 2)]


def test_resume_on_a_backend_that_is_not_there_changes_nothing(make_clocked: MakeRun) -> None:
    run = make_clocked()
    run.cancel()
    with pytest.raises(UnknownBackendError):
        run.resume(replicas=3, backend="nowhere")
    assert run.status().size == 2
    assert run.status().state == "cancelled"


def test_resume_leaves_a_start_alone_that_is_under_way(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_clocked()
    run.store.delete(keys.handle(1, 0))
    with pytest.raises(UsageError, match="replica 1 of run-1 is being started"):
        run.resume([1])
    scripted.set(0, **FAILED)
    assert run.resume() == [0]
    clock.now += 61
    assert run.resume() == [1]


def test_resume_leaves_a_replica_alone_that_queues_at_its_provider(
    make_clocked: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_clocked()
    scripted.set(1, state="pending")
    clock.now += 3600
    with pytest.raises(UsageError, match="no replica of it has ended early"):
        run.resume()


def test_resume_of_a_replica_that_cannot_be_asked_ends_its_old_life(
    make_clocked: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_clocked()
    scripted.set(1, state="unknown")
    scripted.set(0, **FAILED)
    assert run.resume() == [0]  # not that one, unless it is named
    assert run.resume([1]) == [1]
    assert json.loads((scripted.directory / "1.0.json").read_text())["cancel_calls"] == 1
    assert run.status().replicas[1].attempt == 1


def test_resume_from_a_machine_without_the_launch_directory(
    make_run: MakeRun, scripted: ScriptedExecutor, store_uri: str, tmp_path: Path
) -> None:
    run = make_run()
    run.cancel()
    Path.cwd().rename(tmp_path / "gone")
    os.chdir(tmp_path)
    # The scripted backend's machines have the trainer; this one need not.
    assert Run.open(open_store(store_uri).uri, run.run_id).resume() == [0, 1]
