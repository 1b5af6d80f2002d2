"""The trainer's figures over processes and micro-batches, and TAID's way through them."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import pytest
import torch

from diloco_cloud.composer.channels import ChannelLoss, SDPOOptions, idle, sdpo_loss
from diloco_cloud.composer.losses import TAIDScheduler
from diloco_cloud.composer.metrics import ChannelMetrics
from diloco_cloud.composer.taid_progress import TAIDProgress


class Process:
    """One of several processes, each a thread: what ChannelMetrics asks of accelerate."""

    device = torch.device("cpu")

    def __init__(self, rank: int, barrier: Barrier, slots: list[Any]) -> None:
        self.num_processes = 1  # for gather_object, which needs torch.distributed
        self._rank, self._barrier, self._slots = rank, barrier, slots

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        self._slots[self._rank] = own
        self._barrier.wait()
        found = torch.cat(self._slots)
        self._barrier.wait()
        return found


def on_two(work: Callable[[int, Any], Any]) -> list[Any]:
    barrier, slots, results = Barrier(2, timeout=20), [None, None], [None, None]

    def run(rank: int) -> None:
        results[rank] = work(rank, Process(rank, barrier, slots))

    threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def found(loss: float, tokens: int, **figures: float) -> ChannelLoss:
    metrics = {"loss": loss, **figures}
    return ChannelLoss(
        torch.tensor(0.0),
        active=tokens,
        tokens=tokens,
        metrics={name: torch.tensor(value) for name, value in metrics.items()},
    )


NOTHING = idle("no rollout with a hint", like=torch.zeros(1))


def test_metrics_of_two_processes_are_one_and_weighed_by_tokens() -> None:
    batches = [
        [found(1.0, 10, per_token_max=9.0), NOTHING],
        [found(2.0, 10, per_token_max=2.0), found(5.0, 20, per_token_max=3.0)],
    ]

    def work(rank: int, accelerator: Any) -> Any:
        metrics = ChannelMetrics(accelerator)
        added = [metrics.add("sdpo", batch[rank], "train") for batch in batches]
        metrics.add_mean("grpo/loss", torch.tensor(float(rank)), "train")
        assert metrics.take("eval") == {}
        taken = metrics.take("train")
        assert metrics.take("train") == {}
        return added, taken, dict(metrics.activity["sdpo"].total)

    first, second = on_two(work)
    assert first == second
    added, figures, counted = first
    assert added == [(1.0, 10), (4.0, 30)]
    assert figures == {"sdpo/loss": 130 / 40, "sdpo/per_token_max": 9.0, "grpo/loss": 0.5}
    assert counted == {"steps": 2, "active": 40, "tokens": 40, "skipped": 0}


def test_metrics_of_idle_processes_have_no_loss() -> None:
    def work(rank: int, accelerator: Any) -> Any:
        metrics = ChannelMetrics(accelerator)
        return metrics.add("replay", NOTHING, "train"), metrics.take("train")

    assert on_two(work) == [((0.0, 0), {})] * 2


def test_taid_follows_the_mean_over_tokens_however_many_there_are() -> None:
    ends = []
    for by_step in ([(4, 4), (4, 4)], [(1, 30), (2, 0)], [(2, 0), (30, 30)]):
        progress = TAIDProgress(TAIDScheduler(1000, alpha=0.5, beta=0.0))
        for step, (loss, (first, last)) in enumerate(zip((4.0, 2.0), by_step, strict=True)):
            assert progress.follow(loss, first, step, ends_step=False) is None
            ends.append(progress.follow(loss, last, step, ends_step=True))
    assert ends[:2] == ends[2:4] == ends[4:]
    assert ends[1] > ends[0] == 0.4


def test_sdpo_loss_that_is_logged_is_a_mean_whatever_divides_the_sum() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    mask = torch.tensor([[1, 1, 0], [0, 0, 1]])
    options = SDPOOptions(token_clip=0.1)
    own = sdpo_loss(student, teacher, mask, options)
    shared = sdpo_loss(student, teacher, mask, options, num_items=30)
    assert shared.loss.item() == pytest.approx(own.loss.item() / 10)
    assert shared.metrics["loss"].item() == pytest.approx(own.loss.item())
