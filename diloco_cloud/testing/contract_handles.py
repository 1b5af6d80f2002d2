"""The contract of handles: any process can use them, and what they do not find is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict

import pytest

from diloco_cloud.executor import (
    LaunchOptions,
    RecoversReplicas,
    ReplicaHandle,
    ServerlessExecutor,
)
from diloco_cloud.testing.contract_base import ContractBase
from diloco_cloud.testing.fleet import Fleet

MakeExecutor = Callable[[], ServerlessExecutor]


def _copy(handle: ReplicaHandle) -> ReplicaHandle:
    """The handle as another process reads it."""
    return ReplicaHandle(**json.loads(json.dumps(asdict(handle))))


class HandlesContract(ContractBase):
    """Handles, and the executors of other processes."""

    def test_handle_is_json(self, fleet: Fleet) -> None:
        (handle,) = fleet.launch("tell")
        assert _copy(handle) == handle

    def test_fresh_executor_follows_and_cancels(
        self, fleet: Fleet, make_executor: MakeExecutor
    ) -> None:
        (handle,) = fleet.launch("sleep")
        copy, other = _copy(handle), make_executor()
        fleet.reaches(handle, "running")
        fleet.until(lambda: other.poll(copy) == "running", "another executor sees it running")
        fleet.until(lambda: "asleep" in other.stream_logs(copy), "another executor sees its log")
        other.cancel(copy)
        (result,) = make_executor().collect([copy], timeout=self.patience_s)
        assert (result["rank"], result["status"]) == (handle.rank, "cancelled")
        assert fleet.reaches(handle, "cancelled")

    def test_fresh_executor_knows_how_a_replica_ended(
        self, fleet: Fleet, make_executor: MakeExecutor
    ) -> None:
        handles = fleet.launch("fail_on_rank", 2, rank=0)
        fleet.collect(handles)
        statuses = [make_executor().poll(_copy(handle)) for handle in handles]
        assert statuses == ["failed", "succeeded"]
        assert statuses[0].reason == "exit_code"

    def test_replica_that_the_provider_does_not_know_is_lost(self, fleet: Fleet) -> None:
        (handle,) = fleet.launch("tell")
        for stranger in (self.unknown(handle), ReplicaHandle(0, "no-such-backend", {"id": "1"})):
            status = fleet.executor.poll(stranger)
            assert (status, status.reason) == ("failed", "lost")
            assert fleet.executor.stream_logs(stranger) == ""
            fleet.executor.cancel(stranger)
            (result,) = fleet.executor.collect([stranger], timeout=self.patience_s)
            assert (result["status"], bool(result["error"])) == ("failed", True)

    def test_provider_that_cannot_be_reached_fails_nobody(
        self, fleet: Fleet, make_executor: MakeExecutor, outage: AbstractContextManager[None]
    ) -> None:
        (handle,) = fleet.launch("sleep")
        fleet.reaches(handle, "running")
        other = make_executor()
        with outage:
            fleet.until(lambda: other.poll(handle) == "unknown", "the state is unknown")
            assert other.poll(handle).message
            other.stream_logs(handle)
            (result,) = other.collect([handle], timeout=0)
            assert (result["status"], bool(result["error"])) == ("unknown", True)
        fleet.reaches(handle, "running")
        fleet.until(lambda: other.poll(handle) == "running", "it is known again")

    def test_recover_finds_what_was_launched_by_name(
        self, fleet: Fleet, make_executor: MakeExecutor
    ) -> None:
        other = make_executor()
        if not isinstance(other, RecoversReplicas):
            pytest.skip("this executor has no recover")
        first = fleet.launch("tell", 2)
        again = fleet.launch("sleep", options=LaunchOptions(world_size=2, attempt=1))
        namesake = LaunchOptions(name=f"{fleet.name}-b")
        fleet.launch("tell", options=namesake)
        fleet.collect(first)
        found = other.recover(fleet.name)
        assert sorted(handle.rank for handle in found) == [0, 0, 1]
        going = [handle for handle in found if not other.poll(handle).is_terminal]
        assert [handle.rank for handle in going] == [0]
        other.cancel(going[0])
        fleet.reaches(again[0], "cancelled")
        assert other.recover(fleet.name[:-1]) == []

    def test_methods_may_be_called_from_many_threads(self, fleet: Fleet) -> None:
        handles = fleet.launch("count", 4, lines=3)
        with ThreadPoolExecutor(12) as pool:
            states = list(pool.map(fleet.executor.poll, handles * 3))
            logs = list(pool.map(fleet.executor.stream_logs, handles * 3))
            collected = pool.map(lambda _: fleet.collect(handles), range(3))
            ends = [[result["status"] for result in results] for results in collected]
        assert len(states) == len(logs) == 12
        assert ends == [["succeeded"] * 4] * 3
