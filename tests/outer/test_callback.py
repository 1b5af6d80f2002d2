"""The callback in Hugging Face's real Trainer, each replica in a process of its own."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.outer import DiLoCoCallback, MockManager


class Net(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x).squeeze(-1) - y).square().mean()}


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, rank: int, width: int = 4) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.x = torch.randn(64, width, generator=generator)
        self.y = self.x.sum(-1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[i], "y": self.y[i]}


class Crash(TrainerCallback):
    """Ends a replica at one of its steps, as a kill would."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            raise KeyboardInterrupt


@dataclass
class Ended:
    """What is left of a replica after training."""

    weights: list[torch.Tensor]
    steps: int
    outer_steps: int
    inner_steps: int
    momentum: int
    hooks: int
    resumed_steps: int


class Replica:
    """One life of a rank: a trainer with the callback in it."""

    def __init__(
        self, where: str, rank: int, attempt: int = 0, *, crash_at: int = 0, **arguments: Any
    ) -> None:
        door = ObjectStoreAllReduce(
            f"{where}/run", rank, 2, attempt=attempt, timeout_s=60, poll_interval_s=0.02
        )
        self.callback = DiLoCoCallback(MockManager(door), sync_every=4)
        self.net = Net(seed=rank)
        settings = TrainingArguments(
            output_dir=f"{where}/{rank}",
            max_steps=10,
            per_device_train_batch_size=4,
            learning_rate=0.05,
            report_to=[],
            save_strategy="no",
            logging_steps=2,
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            **arguments,
        )
        extra = [Crash(crash_at)] if crash_at else []
        self.trainer = Trainer(
            model=self.net,
            args=settings,
            train_dataset=Data(rank),
            callbacks=[self.callback, *extra],
        )

    def ended(self) -> Ended:
        manager = self.callback.manager
        return Ended(
            weights=[p.detach().clone() for p in self.net.parameters()],
            steps=self.trainer.state.global_step,
            outer_steps=manager.current_step(),
            inner_steps=manager.progress.inner_step,
            momentum=sum(len(state.optimizer) for state in manager.fragments.states()),
            hooks=len(self.trainer.optimizer.optimizer._optimizer_step_post_hooks),
            resumed_steps=self.callback.resumed_steps,
        )


def train(where: str, rank: int, times: int, arguments: dict[str, Any]) -> list[Ended]:
    """Train ``times`` times in a row with the same trainer."""
    torch.set_num_threads(1)
    replica = Replica(where, rank, **arguments)
    ends = []
    for _ in range(times):
        replica.trainer.train()
        ends.append(replica.ended())
    return ends


def fail_then_train(where: str, rank: int) -> list[Ended]:
    """A first ``train()`` that raises in the model, then one that does not."""
    replica = Replica(where, rank)
    good, replica.trainer.train_dataset = replica.trainer.train_dataset, Data(rank, width=3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        replica.trainer.train()
    replica.trainer.train_dataset = good
    replica.trainer.train()
    return [replica.ended()]


def crash_and_restart(where: str, rank: int) -> list[Ended]:
    """Die after six steps; the next life takes what remains; one more finds nothing to do."""
    with pytest.raises(KeyboardInterrupt):
        Replica(where, rank, crash_at=6).trainer.train()
    lives = []
    for attempt in (1, 2):
        replica = Replica(where, rank, attempt)
        replica.trainer.train()
        lives.append(replica.ended())
    return lives


def same(left: Ended, right: Ended) -> bool:
    return all(map(torch.equal, left.weights, right.weights))


@pytest.mark.parametrize("arguments", [{}, {"gradient_accumulation_steps": 2}], ids=str)
def test_trainers_end_equal_after_an_unfinished_round(
    pool: ProcessPoolExecutor, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    futures = [pool.submit(train, str(tmp_path), rank, 1, arguments) for rank in range(2)]
    (first,), (second,) = (future.result(timeout=120) for future in futures)
    assert same(first, second)
    for end in (first, second):
        # 10 steps are two rounds of 4, and the final sync of the last 2.
        assert (end.steps, end.outer_steps, end.inner_steps) == (10, 3, 10)
        assert end.hooks == 0


def test_second_train_carries_on(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    futures = [pool.submit(train, str(tmp_path), rank, 2, {}) for rank in range(2)]
    first, second = (future.result(timeout=120) for future in futures)
    assert same(first[0], second[0])
    assert same(first[1], second[1])
    assert not same(first[0], first[1])
    assert [end.outer_steps for end in first] == [3, 6]
    assert [end.steps for end in first] == [10, 10]
    assert first[0].momentum == first[1].momentum == 2


def test_training_that_failed_can_be_started_again(
    pool: ProcessPoolExecutor, tmp_path: Path
) -> None:
    failing = pool.submit(fail_then_train, str(tmp_path), 0)
    other = pool.submit(train, str(tmp_path), 1, 1, {})
    assert same(failing.result(timeout=120)[0], other.result(timeout=120)[0])


def test_restarted_replica_takes_the_steps_that_remain(
    pool: ProcessPoolExecutor, tmp_path: Path
) -> None:
    survivor = pool.submit(train, str(tmp_path), 1, 1, {})
    back, again = pool.submit(crash_and_restart, str(tmp_path), 0).result(timeout=120)
    (other,) = survivor.result(timeout=120)
    # One round of 4 was merged before it died at 6; of 10 steps, 6 remain.
    assert (back.resumed_steps, back.steps) == (4, 6)
    assert same(back, other)
    assert same(again, other)
    assert again.outer_steps == 3
