"""Runs of one id in different stores, whose replicas one account holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from manual_clock import Clock
from scripted_executor import ScriptedExecutor

from diloco_cloud import keys
from diloco_cloud.executor import LaunchOptions, ReplicaHandle
from diloco_cloud.run import Run, RunSpec, launch
from diloco_cloud.run.names import provider_name


class Account(ScriptedExecutor):
    """Knows its replicas by the name they were launched as, as a provider does."""

    def __init__(self) -> None:
        super().__init__()
        self.launched_by_name: dict[str, list[ReplicaHandle]] = {}
        self.cancelled: list[str] = []

    def launch_replicas(
        self,
        *args: Any,
        options: LaunchOptions = LaunchOptions(),  # noqa: B008
        **kwargs: Any,
    ) -> list[ReplicaHandle]:
        handles = super().launch_replicas(*args, options=options, **kwargs)
        for handle in handles:
            handle.metadata["name"] = options.name
        self.launched_by_name.setdefault(options.name, []).extend(handles)
        return handles

    def recover(self, name: str) -> list[ReplicaHandle]:
        return self.launched_by_name.get(name, [])

    def cancel(self, handle: ReplicaHandle) -> None:
        self.cancelled.append(handle.metadata["name"])


@pytest.fixture
def start(
    scripted: ScriptedExecutor, trainer: str, tmp_path: Path, clock: Clock
) -> Callable[[str, Account], Run]:
    """Launches "run-1" in a store of its own; its launcher dies before it can say what it did."""

    def start_in(store: str, account: Account) -> Run:
        spec = RunSpec(run_id="run-1", backend="scripted", replicas=2, trainer=trainer)
        launch(spec, tmp_path / store, executor=account, clock=clock.time)
        run = Run.open(tmp_path / store, "run-1", executor=account, clock=clock.time)
        for rank in range(2):
            run.store.delete(keys.handle(rank, 0))
        return run

    return start_in


def test_cancel_stops_no_replica_of_a_namesake_in_another_store(
    start: Callable[[str, Account], Run],
) -> None:
    account = Account()
    first, second = start("a", account), start("b", account)
    assert first.run_id == second.run_id
    assert first.cancel() == [0, 1]
    assert account.cancelled == [first.provider_name] * 2
    assert second.provider_name not in account.cancelled


def test_run_that_was_deleted_is_not_taken_for_its_successor(
    start: Callable[[str, Account], Run], clock: Clock
) -> None:
    account = Account()
    first = start("a", account)
    first.down(cancel=True)
    clock.now += 1
    second = start("a", account)
    assert first.provider_name != second.provider_name


def test_provider_name_is_read_back_wherever_the_store_is_seen_from(
    start: Callable[[str, Account], Run], tmp_path: Path
) -> None:
    account = Account()
    run = start("a", account)
    (tmp_path / "elsewhere").symlink_to(tmp_path / "a")
    again = Run.open(tmp_path / "elsewhere", "run-1", executor=account)
    assert again.uri != run.uri
    assert again.provider_name == run.provider_name


def test_provider_name_begins_with_the_id_and_keeps_to_its_letters() -> None:
    name = provider_name("run-1", "s3://bucket/runs/run-1", 1.5)
    assert name.startswith("run-1-")
    mark = name.removeprefix("run-1-")
    assert len(mark) == 5
    assert mark.isalnum()
    assert mark == mark.lower()
