"""The contract of ``poll``, ``collect`` and ``cancel``: how replicas end, and how that is told."""

from __future__ import annotations

import signal
import time

from diloco_cloud.executor import TERMINAL_STATES, ReplicaStatus
from diloco_cloud.testing.contract_base import ContractBase
from diloco_cloud.testing.fleet import Fleet

RESULT_KEYS = {"rank", "status", "exit_code", "error", "result"}


def _told(status: ReplicaStatus) -> tuple[str, int | None, str | None]:
    return str(status), status.exit_code, status.reason


class EndingContract(ContractBase):
    """``poll``, ``collect`` and ``cancel``."""

    def test_success_is_told_with_no_reason(self, fleet: Fleet) -> None:
        (result,) = fleet.collect(fleet.launch("tell", a=1))
        assert set(result) >= RESULT_KEYS
        assert (result["rank"], result["error"]) == (0, None)
        assert (result["status"], result["status"].reason) == ("succeeded", None)
        assert result["exit_code"] in ((0,) if self.knows_exit_codes else (0, None))
        if self.returns_results is not None:
            assert result["result"] == ({"a": 1} if self.returns_results else None)

    def test_exception_is_a_failure(self, fleet: Fleet) -> None:
        (handle,) = fleet.launch("fail", message="boom on purpose")
        (result,) = fleet.collect([handle])
        assert (result["status"], result["status"].reason) == ("failed", "exit_code")
        assert result["exit_code"] in ((1,) if self.knows_exit_codes else (1, None))
        assert result["error"]
        assert result["result"] is None
        assert "ValueError: boom on purpose" in fleet.output(handle, "boom on purpose")

    def test_exit_code_is_told(self, fleet: Fleet) -> None:
        (result,) = fleet.collect(fleet.launch("leave", code=7))
        assert (result["status"], result["status"].reason) == ("failed", "exit_code")
        assert result["exit_code"] in ((7,) if self.knows_exit_codes else (7, None))
        assert result["status"].exit_code == result["exit_code"]

    def test_death_by_a_signal_is_a_failure(self, fleet: Fleet) -> None:
        (result,) = fleet.collect(fleet.launch("kill_self", signum=int(signal.SIGSEGV)))
        assert result["status"] == "failed"
        assert result["status"].reason is not None
        # Negative as Python tells it, or above 128 as a shell does.
        codes = (-signal.SIGSEGV, 128 + signal.SIGSEGV)
        assert result["exit_code"] in (codes if self.knows_exit_codes else (*codes, 1, None))

    def test_one_failure_hides_no_other_replica(self, fleet: Fleet) -> None:
        handles = fleet.launch("fail_on_rank", 3, rank=1)
        results = fleet.collect(handles[::-1])
        assert [result["rank"] for result in results] == [2, 1, 0]
        assert [result["status"] for result in results] == ["succeeded", "failed", "succeeded"]

    def test_collect_of_nothing_is_nothing(self, fleet: Fleet) -> None:
        assert fleet.executor.collect([]) == []

    def test_collect_gives_up_at_its_timeout(self, fleet: Fleet) -> None:
        ended, going = [fleet.launch(name)[0] for name in ("tell", "sleep")]
        fleet.collect([ended])
        began = time.monotonic()
        first, second = fleet.executor.collect([ended, going], timeout=1.0)
        assert time.monotonic() - began < self.patience_s
        assert first["status"] == "succeeded"
        assert second["status"] not in TERMINAL_STATES
        assert second["error"]
        assert (second["exit_code"], second["result"]) == (None, None)
        assert fleet.executor.poll(going) not in TERMINAL_STATES

    def test_replica_that_outruns_its_timeout_is_stopped(self, fleet: Fleet) -> None:
        (handle,) = fleet.launch("sleep", timeout=self.shortest_timeout_s)
        (result,) = fleet.collect([handle])
        assert (result["status"], result["status"].reason) == ("failed", "timeout")

    def test_cancel_may_be_repeated_and_is_final(self, fleet: Fleet) -> None:
        (handle,) = fleet.launch("sleep")
        fleet.reaches(handle, "running")
        for _ in range(2):
            fleet.executor.cancel(handle)
        status = fleet.reaches(handle, "cancelled")
        assert status.reason == "cancelled"
        fleet.executor.cancel(handle)
        (result,) = fleet.collect([handle])
        assert (result["status"], bool(result["error"])) == ("cancelled", True)

    def test_cancel_right_after_the_launch_is_heard(self, fleet: Fleet) -> None:
        (handle,) = fleet.launch("sleep")
        fleet.executor.cancel(handle)
        assert fleet.reaches(handle, "cancelled").reason == "cancelled"

    def test_cancel_leaves_what_has_ended_as_it_was(self, fleet: Fleet) -> None:
        (handle,) = fleet.launch("tell")
        fleet.collect([handle])
        before = fleet.executor.poll(handle)
        fleet.executor.cancel(handle)
        assert _told(fleet.executor.poll(handle)) == _told(before)

    def test_cancel_of_one_leaves_the_others_running(self, fleet: Fleet) -> None:
        handles = fleet.launch("sleep", 3)
        for handle in handles:
            fleet.reaches(handle, "running")
        fleet.executor.cancel(handles[1])
        fleet.reaches(handles[1], "cancelled")
        assert fleet.executor.poll(handles[0]) == "running"
        assert fleet.executor.poll(handles[2]) == "running"
