"""What an inner checkpoint holds, and what becomes of one that cannot be used."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fleet import Death, Fleet, Killed, WatchedStore
from replicas import Job
from safetensors.torch import load
from torch import nn

from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.exchange.signing import Signer
from diloco_cloud.outer import MockManager, make_diloco_outer_loop, tensor_file
from diloco_cloud.store.memory import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

#: Dies once its contribution to round 2 is in the store.
AFTER_ROUND_2 = Death(method="create", key="00000002.0/put", after=True)
CHECKPOINT = "inner/0000/00000002.0000.safetensors"


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


class Noisy(nn.Module):
    """Draws from torch's random state, and keeps a buffer that its output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 4))
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x - self.mean)
        self.mean.lerp_(x.mean(0), 0.1)
        return y


Optimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterator[nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, **settings)


def life(
    name: str,
    attempt: int = 0,
    death: Death | None = None,
    *,
    optimizer: Optimizer = adamw,
    dtype: torch.dtype = torch.float32,
    steps: int = 20,
) -> str:
    """One life of the only replica of a run; seeded anew like any other. Its global digest."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    store: Any = WatchedStore(MemoryStore(name), death, {})
    door = ObjectStoreAllReduce(f"memory://{name}", 0, 1, attempt=attempt, store=store)
    manager = MockManager(door, checkpoint_inner=True, snapshot_every=2)
    model = Noisy().to(dtype)
    inner = optimizer(model.parameters())
    outer = make_diloco_outer_loop(manager, model, inner, sync_every=4)
    torch.randn(3)  # What a trainer may draw before it trains.
    with outer:
        while outer.schedule_step < steps:
            inner.zero_grad()
            x = torch.randn(8, 4).to(dtype) * (1 + random.random() + np.random.rand())
            model(x).square().mean().backward()
            inner.step()
    manager.shutdown(finished=True)
    return str(manager.global_digest())


def killed(name: str, **settings: Any) -> None:
    with pytest.raises(Killed):
        life(name, 0, AFTER_ROUND_2, **settings)


class Fp32States(torch.optim.AdamW):
    """Keeps fp32 states for bf16 parameters, in lists and tuples too."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                entries = self.state[p]
                if not entries:
                    entries["slow"] = p.detach().float().clone()
                    entries["past"] = [(0, torch.zeros(()))]
                entries["slow"] -= 0.01 * p.grad.float()
                count, norm = entries["past"][0]
                entries["past"] = [(count + 1, norm + p.grad.float().norm())]
                p.data.copy_(entries["slow"] * (1 - 0.001 * entries["past"][0][1]))


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        (adamw, torch.float32),
        (lambda p: adamw(p, amsgrad=True, fused=True), torch.float32),
        (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), torch.float32),
        (lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9), torch.bfloat16),
        (Fp32States, torch.bfloat16),
    ],
    ids=["adamw", "fused amsgrad", "sgd", "bf16", "fp32 states of bf16"],
)
def test_optimizer_buffers_and_random_states_come_back(
    name: str, optimizer: Optimizer, dtype: torch.dtype
) -> None:
    expected = life(uuid.uuid4().hex, optimizer=optimizer, dtype=dtype)
    killed(name, optimizer=optimizer, dtype=dtype)
    assert life(name, 1, optimizer=optimizer, dtype=dtype) == expected


@pytest.mark.parametrize("part", ["optimizer", "random", "buffer"])
def test_without_any_part_of_it_the_run_ends_differently(name: str, part: str) -> None:
    """So that the test above can fail."""
    expected = life(uuid.uuid4().hex)
    killed(name)
    store = MemoryStore(name)
    tensors, text = tensor_file.decode(store.get(CHECKPOINT), Signer(), CHECKPOINT)
    for tensor_name, tensor in tensors.items():
        if tensor_name.startswith(f"{part}:") and "step" not in tensor_name:
            tensor.copy_(torch.zeros_like(tensor) if part != "random" else tensor.flip(0))
    store.put(CHECKPOINT, tensor_file.encode(tensors, json.loads(text), Signer()))
    assert life(name, 1) != expected


def test_any_tool_can_open_it(name: str) -> None:
    killed(name)
    tensors = load(MemoryStore(name).get(CHECKPOINT))
    assert tensors["optimizer:body.0.weight/exp_avg"].shape == (16, 4)
    assert not any(name.startswith("local:") for name in tensors)  # They are the global ones.


def _flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "no file": lambda data: b"\xff" * 100,
    "cut": lambda data: data[:-1],
    "a tensor's byte": lambda data: _flip(data, len(data) - 3),
    "a header's byte": lambda data: _flip(data, data.index(b"position") + 13),
    "not ours": lambda data: data.replace(b'\\"rank\\": 0', b'\\"rank\\": 1'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_costs_the_inner_state_and_nothing_else(
    name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    killed(name)
    store = MemoryStore(name)
    store.put(CHECKPOINT, DAMAGE[damage](store.get(CHECKPOINT)))
    digest = life(name, 1)
    assert "the inner state is fresh" in caplog.text
    assert digest != life(uuid.uuid4().hex)


@pytest.mark.parametrize(
    "other",
    [
        lambda p: torch.optim.SGD(p, lr=0.01),
        lambda p: adamw(p, amsgrad=True),
    ],
    ids=["class", "switch"],
)
def test_another_optimizers_checkpoint_is_ignored(
    name: str, other: Optimizer, caplog: pytest.LogCaptureFixture
) -> None:
    killed(name)
    life(name, 1, optimizer=other)
    assert "of another model, optimizer or schedule" in caplog.text


def test_a_state_with_nan_is_not_carried_into_a_new_life(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def poisoned(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = adamw(parameters)

        def poison(*_args: Any) -> None:
            for entries in optimizer.state.values():
                entries["exp_avg_sq"][0] = float("nan")

        optimizer.register_step_post_hook(poison)
        return optimizer

    with pytest.raises(Killed):
        life(name, 0, Death(key="00000000.0/put", method="create", after=True), optimizer=poisoned)
    life(name, 1)
    assert "has NaN or infinite values" in caplog.text


def test_an_optimizer_that_cannot_be_stored_is_told_of_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def odd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = adamw(parameters)
        first = optimizer.param_groups[0]["params"][0]
        optimizer.register_step_post_hook(lambda *_: optimizer.state[first].update(odd=object()))
        return optimizer

    life(name, optimizer=odd)
    assert caplog.text.count("no inner checkpoints: ") == 1
    assert MemoryStore(name).list("inner/") == []


def test_the_prefix_holds_two_rounds_of_each_rank(name: str) -> None:
    """And while the third is being written, three."""
    most = [0]
    job = Job(sync_every=2, steps=60)

    def count(rank: int, attempt: int, step: int, manager: MockManager) -> None:
        found = [info.key for info in MemoryStore(name).list(f"inner/{rank:04d}/")]
        most[0] = max(most[0], len(found))

    run = Fleet(job, quorum=2, manager={"checkpoint_inner": True}, name=name, on_step=count)
    run.run({(0, attempt): Death(90 - 10 * attempt) for attempt in range(4)})
    assert 2 <= most[0] <= 3
    assert MemoryStore(name).list("inner/") == []


def test_a_life_that_was_handed_over_to_goes_on(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def preempt(rank: int, attempt: int, step: int, manager: MockManager) -> None:
        if (rank, attempt, step) == (1, 0, 8):
            manager.request_hand_over()

    job = Job(sync_every=6, steps=30)
    run = Fleet(job, quorum=2, manager={"checkpoint_inner": True}, name=name, on_step=preempt)
    caplog.set_level("INFO")
    assert run.run()[1].attempt == 1
    assert "going on with the inner state of round 1's contribution" in caplog.text
