"""Who a replica is, from its environment."""

from __future__ import annotations

import pytest

from diloco_cloud.replica.identity import Identity, replicas_now


def test_rank_and_attempt_come_from_the_environment() -> None:
    environ = {"REPLICA_RANK": "2", "DILOCO_ATTEMPT": "3"}
    assert Identity.from_environ(4, environ) == Identity(rank=2, attempt=3)
    assert Identity.from_environ(4, {"REPLICA_RANK": "0"}) == Identity(rank=0, attempt=0)


def test_another_rank_variable_is_honoured() -> None:
    environ = {"REPLICA_RANK": "0", "MY_RANK": "1", "DILOCO_RANK_ENV": "MY_RANK"}
    assert Identity.from_environ(2, environ).rank == 1


def test_missing_rank_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="REPLICA_RANK is not set"):
        Identity.from_environ(2, {"RANK": "0"})


@pytest.mark.parametrize("rank", ["-1", "2", "x"])
def test_rank_outside_the_world_is_a_value_error(rank: str) -> None:
    with pytest.raises(ValueError, match=r"outside \[0, 2\)|not a whole number"):
        Identity.from_environ(2, {"REPLICA_RANK": rank})


def test_a_resumed_run_may_have_another_number_of_replicas() -> None:
    assert replicas_now(4, {}) == 4
    assert replicas_now(4, {"NUM_REPLICA_GROUPS": "8"}) == 8
    assert replicas_now(4, {"NUM_REPLICA_GROUPS": "2"}) == 2
    with pytest.raises(ValueError, match="no number of replicas"):
        replicas_now(4, {"NUM_REPLICA_GROUPS": "0"})
