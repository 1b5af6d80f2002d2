"""What ``status`` shows of a run's figures."""

from __future__ import annotations

import io

from rich.console import Console

from diloco_cloud.cli.tables import status_view
from diloco_cloud.run.status import ReplicaView, RunStatus


def shown(*views: ReplicaView) -> str:
    status = RunStatus(
        run_id="r",
        backend="local",
        state="running",
        replicas=views,
        size=len(views),
        round=1,
        rounds=4,
        missing=(),
        created_at=0.0,
    )
    console = Console(file=io.StringIO(), width=120)
    console.print(status_view(status))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_status_shows_small_losses_and_rewards_of_zero() -> None:
    both = shown(
        *(
            ReplicaView(rank=rank, attempt=0, state="running", loss=loss, reward=reward)
            for rank, (loss, reward) in enumerate([(-4.7e-7, 0.0), (-1.3e-7, 0.5)])
        )
    )
    assert "loss -3.0e-07  reward 0.2500" in both
    assert "-4.7e-07   0.0000" in both
    assert "-1.3e-07   0.5000" in both


def test_status_has_no_reward_where_nobody_earns_one() -> None:
    one = shown(ReplicaView(rank=0, attempt=0, state="running", loss=5.5432))
    assert "loss 5.5432" in one
    assert "reward" not in one
