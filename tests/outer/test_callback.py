"""The callback in Hugging Face's real Trainer."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.outer import DiLoCoCallback, MockManager


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x).squeeze(-1) - y).square().mean()}


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.x = torch.randn(64, 4, generator=generator)
        self.y = self.x.sum(-1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[i], "y": self.y[i]}


def trainer(net: Net, rank: int, callback: DiLoCoCallback, where: Path, **args: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(where / str(rank)),
        max_steps=10,
        per_device_train_batch_size=4,
        learning_rate=0.05,
        report_to=[],
        save_strategy="no",
        logging_steps=2,
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **args,
    )
    return Trainer(model=net, args=arguments, train_dataset=Data(rank), callbacks=[callback])


@pytest.fixture
def callbacks() -> list[DiLoCoCallback]:
    uri = f"memory://{uuid.uuid4().hex}"
    doors = [ObjectStoreAllReduce(uri, r, 2, timeout_s=30, poll_interval_s=0.02) for r in range(2)]
    return [DiLoCoCallback(MockManager(door), sync_every=4) for door in doors]


def train_all(trainers: list[Trainer]) -> None:
    with ThreadPoolExecutor(len(trainers)) as pool:
        for future in [pool.submit(t.train) for t in trainers]:
            future.result(timeout=60)


def weights(net: Net) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("args", [{}, {"gradient_accumulation_steps": 2}], ids=str)
def test_trainers_end_equal_after_an_unfinished_round(
    callbacks: list[DiLoCoCallback], tmp_path: Path, args: dict[str, Any]
) -> None:
    nets = [Net(), Net()]
    train_all([trainer(n, r, callbacks[r], tmp_path, **args) for r, n in enumerate(nets)])
    assert torch.equal(weights(nets[0]), weights(nets[1]))
    # 10 steps are two rounds of 4, and the final sync of the last 2.
    assert [c.manager.current_step() for c in callbacks] == [3, 3]
    assert [c.manager.progress.inner_step for c in callbacks] == [10, 10]


def test_hooks_are_gone_after_training_and_a_second_train_carries_on(
    callbacks: list[DiLoCoCallback], tmp_path: Path
) -> None:
    nets = [Net(), Net()]
    trainers = [trainer(n, r, callbacks[r], tmp_path) for r, n in enumerate(nets)]
    train_all(trainers)
    first = weights(nets[0])
    momentum = callbacks[0].manager.states()[0].optimizer
    assert momentum
    for t in trainers:
        assert not t.optimizer.optimizer._optimizer_step_post_hooks
    train_all(trainers)
    assert [c.manager.current_step() for c in callbacks] == [6, 6]
    assert torch.equal(weights(nets[0]), weights(nets[1]))
    assert not torch.equal(weights(nets[0]), first)


def test_training_that_failed_can_be_started_again(
    callbacks: list[DiLoCoCallback], tmp_path: Path
) -> None:
    nets = [Net(), Net()]
    trainers = [trainer(n, r, callbacks[r], tmp_path) for r, n in enumerate(nets)]
    good = trainers[0].train_dataset
    trainers[0].train_dataset = [{"x": torch.ones(3), "y": torch.ones(())}] * 4
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainers[0].train()
    trainers[0].train_dataset = good
    train_all(trainers)
    assert torch.equal(weights(nets[0]), weights(nets[1]))


class Crash(TrainerCallback):
    """Ends a replica at one of its steps, as a kill would."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            raise SystemExit(9)


def test_restarted_replica_takes_the_steps_that_remain(tmp_path: Path) -> None:
    uri = f"memory://{uuid.uuid4().hex}"

    def callback(rank: int, attempt: int) -> DiLoCoCallback:
        door = ObjectStoreAllReduce(
            uri, rank, 2, attempt=attempt, timeout_s=30, poll_interval_s=0.02
        )
        return DiLoCoCallback(MockManager(door), sync_every=4)

    nets = [Net(), Net()]
    back = callback(0, 1)
    # All before any trains: accelerate's state is the process's, and a new Trainer resets it.
    survivor = trainer(nets[1], 1, callback(1, 0), tmp_path)
    first, second = trainer(Net(), 0, callback(0, 0), tmp_path), trainer(nets[0], 0, back, tmp_path)
    first.add_callback(Crash(at=6))

    def crash_and_restart() -> int:
        with pytest.raises(SystemExit):
            first.train()
        second.train()
        return second.state.global_step

    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(survivor.train)
        # One round of 4 was merged before it died at 6; of 10 steps, 6 remain.
        assert pool.submit(crash_and_restart).result(timeout=60) == 6
        other.result(timeout=60)
    assert back.resumed_steps == 4
    assert torch.equal(weights(nets[0]), weights(nets[1]))
    again = callback(0, 2)
    net = Net()
    trainer(net, 0, again, tmp_path).train()
    assert torch.equal(weights(net), weights(nets[0]))  # nothing remained to be done
    assert again.manager.current_step() == 3
