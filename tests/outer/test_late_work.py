"""Work that missed a round is in a later one, at the length that the outer step is made for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from fleet import Fleet
from replicas import Job

from diloco_cloud.exchange.layout import l2_norm
from diloco_cloud.exchange.work import Work
from diloco_cloud.outer import MockManager
from diloco_cloud.outer.accounts import at_usual_length


@pytest.mark.parametrize(
    ("work", "factor"),
    [
        (Work(inner_steps=10), 1.0),
        (Work(inner_steps=30), 1.0),
        (Work(inner_steps=8, staleness=1), 1.0),
        (Work(inner_steps=20, staleness=1), 0.5),
        (Work(inner_steps=40, staleness=2), 0.25),
    ],
)
def test_late_work_is_as_long_as_work_that_is_on_time(work: Work, factor: float) -> None:
    tensors = [torch.randn(3, 4), torch.randn(5).bfloat16()]
    found = at_usual_length(tensors, work, 10)
    for before, after in zip(tensors, found, strict=True):
        assert after.dtype == before.dtype
        assert torch.equal(after, before * factor)


def test_a_replica_that_slept_sends_its_work_at_the_usual_length() -> None:
    sent: list[tuple[Work, float]] = []

    def watch(manager: MockManager) -> None:
        usual: Any = manager._exchange.exchange

        def exchange(round_: int, fragment: int, tensors: Any, work: Work, **rest: Any) -> Any:
            assert manager._sync is not None
            sent.append((work, l2_norm(tensors) / l2_norm(manager._sync._host)))
            return usual(round_, fragment, tensors, work, **rest)

        manager._exchange.exchange = exchange  # type: ignore[method-assign]

    def stop(rank: int, attempt: int, step: int, manager: MockManager) -> None:
        if (rank, step) == (1, 2):
            watch(manager)
        if (rank, step) == (1, 19):  # Once before it sends this round's, once after.
            time.sleep(0.5)

    Fleet(
        Job(world_size=4, sync_every=10, steps=160),
        pace_s=dict.fromkeys(range(4), 0.005),
        on_step=stop,
    ).run()
    late = [(work, length) for work, length in sent if work.staleness]
    assert any(work.inner_steps > 10 for work, _ in late)
    for work, length in late:
        assert length == pytest.approx(min(1.0, 10 / work.inner_steps), rel=1e-4)
    assert all(length == 1.0 for work, length in sent if not work.staleness)
