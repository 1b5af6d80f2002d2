"""Whether another life may help, by how the last one ended."""

from __future__ import annotations

import pytest
import torch

from diloco_cloud import errors
from diloco_cloud.replica.identity import Identity
from diloco_cloud.replica.lifetime import Cause
from diloco_cloud.replica.outcome import Outcome


@pytest.mark.parametrize(
    "error",
    [
        errors.StoreError("no"),
        errors.UnreachableError("no"),
        errors.DeniedError("credentials have expired"),
        errors.ExchangeError("no"),
        errors.RoundTimeoutError("no"),
        errors.DriftError("no"),
        errors.CorruptContributionError("no"),
    ],
)
def test_failure_that_may_pass_is_restartable(error: Exception) -> None:
    assert Outcome.failed(error).to_json(Identity(0, 0))["restartable"] is True


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("no"),
        errors.TrainerImportError("no"),
        errors.LayoutMismatchError("no"),
        errors.LeftRunError("no"),
        errors.UnsupportedStoreError("no"),
        ValueError("the trainer's own"),
        ConnectionError("the trainer's own"),
        SystemExit(143),
        KeyboardInterrupt(),
    ],
)
def test_failure_that_every_life_would_meet_is_not(error: BaseException) -> None:
    outcome = Outcome.failed(error)
    assert (outcome.restartable, outcome.reason) == (False, "exit_code")


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_lack_of_memory_is_a_reason_of_its_own(error: Exception) -> None:
    outcome = Outcome.failed(error)
    assert (outcome.restartable, outcome.reason) == (False, "out_of_memory")


@pytest.mark.parametrize(
    ("cause", "handed_over", "message"),
    [
        ("preempted", True, "preempted; its work was handed over"),
        ("preempted", False, "preempted"),
        ("timeout", True, "reached its time limit; its work was handed over"),
    ],
)
def test_early_end_is_restartable(cause: Cause, handed_over: bool, message: str) -> None:
    outcome = Outcome.ended_early(cause, cancelled=False, handed_over=handed_over)
    assert (outcome.state, outcome.exit_code, outcome.reason) == ("failed", 143, cause)
    assert outcome.restartable
    assert outcome.to_json(Identity(0, 0))["error"] == message


@pytest.mark.parametrize("cause", ["preempted", "timeout"])
def test_early_end_that_was_asked_for_is_not(cause: Cause) -> None:
    outcome = Outcome.ended_early(cause, cancelled=True, handed_over=True)
    assert (outcome.state, outcome.reason, outcome.restartable) == ("cancelled", "cancelled", False)
    assert outcome.to_json(Identity(0, 0))["error"] == "cancelled; its work was handed over"
