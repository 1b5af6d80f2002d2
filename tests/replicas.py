"""Small training runs for tests: N replicas in N processes, and the same by hand in one.

Both sides use the same models, the same per-rank data and one thread, so that results can be
compared to the bit.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diloco_cloud.result import read_result
from diloco_cloud.store import open_store


def result_in(run: Path) -> Path:
    """Where a run's result is, in its directory."""
    found = read_result(open_store(str(run)))
    assert found is not None, f"there is no result in {run}"
    return run / found.directory


@dataclass(frozen=True)
class Job:
    """A run: what is trained, how it is cut, how often it is synchronised.

    Attributes:
        streams: an all-gather's contributions are sent chunk by chunk, as large ones are.
    """

    model: str = "mlp"
    world_size: int = 2
    fragments: int = 1
    sync_every: int = 6
    delay: int = 0
    alpha: float = 0.0
    steps: int = 24
    reduction: str = "auto"
    streams: bool = False
    dtype: torch.dtype = torch.float32


class TinyNet(nn.Module):
    """Three layers, so that it can be cut into three fragments."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def build(job: Job, seed: int = 0) -> tuple[nn.Module, list[nn.Module]]:
    """The model and its fragments."""
    torch.manual_seed(seed)
    if job.model == "mlp":
        net = TinyNet().to(job.dtype)
        return net, [net] if job.fragments == 1 else [net.a, net.b, net.c]
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).to(job.dtype)
    if job.fragments == 1:
        return model, [model]
    layers = model.model.layers
    # The head shares the embedding's weight, so both are in the first fragment.
    first = nn.ModuleList([model.model.embed_tokens, layers[0], model.model.norm])
    return model, [first, layers[1], layers[2]]


def loss_of(job: Job, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The loss of one batch; the batch is a function of rank and step."""
    data = torch.Generator().manual_seed(1000 * rank + step)
    if job.model == "mlp":
        x = torch.randn(16, 8, generator=data).to(job.dtype)
        return (model(x).float() - x[:, :4].float().sin()).square().mean()
    ids = torch.randint(0, 48, (2, 12), generator=data)
    return model(input_ids=ids, labels=ids).loss


def inner_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)


def inner_step(job: Job, model: nn.Module, opt: torch.optim.Optimizer, rank: int, t: int) -> float:
    opt.zero_grad()
    loss = loss_of(job, model, rank, t)
    loss.backward()
    opt.step()
    return float(loss.detach())


def train(
    job: Job, uri: str, rank: int, environ: dict[str, str] | None = None, **manager_settings: Any
) -> dict[str, Any]:
    """One replica through the real outer loop; runs in a process of its own.

    ``environ`` reaches a process that was started before it was known, as a pool's are.
    """
    os.environ.update(environ or {})
    from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
    from diloco_cloud.outer import MockManager, make_diloco_outer_loop

    torch.set_num_threads(1)
    door = ObjectStoreAllReduce(
        uri, rank, job.world_size, timeout_s=60, poll_interval_s=0.05, reduction=job.reduction
    )
    # Small chunks give these small models several shards.
    door.exchange.chunk_bytes = 256
    reports: list[Any] = []
    manager = MockManager(door, on_round=reports.append, **manager_settings)
    # Every rank but 0 starts elsewhere: the outer loop must make them equal.
    model, fragments = build(job, seed=rank)
    opt = inner_optimizer(model)
    outer = make_diloco_outer_loop(
        manager,
        fragments,
        opt,
        sync_every=job.sync_every,
        fragment_sync_delay=job.delay,
        fragment_update_alpha=job.alpha,
    )
    losses: list[float] = []
    weights: list[list[torch.Tensor]] = []
    with outer:
        for t in range(job.steps):
            losses.append(inner_step(job, model, opt, rank, t))
            weights.append([p.detach().clone() for p in model.parameters()])
    states = manager.fragments.states()
    digest = manager.global_digest()
    manager.shutdown(finished=True)
    return {
        "losses": losses,
        "weights": weights,
        "digest": digest,
        "model": [p.detach().clone() for p in model.parameters()],
        "globals": [p for s in states for p in s.parameters],
        "momentum": [s.optimizer for s in states],
        "bases": [r.base for r in reports],
    }


def train_with_torchft(job: Job, lighthouse: str, rank: int) -> dict[str, Any]:
    """One replica through torchft's own Manager and gloo, with torchft's DiLoCo as it comes.

    Only the outer optimizer is ours, whose bits do not depend on the machine.
    """
    import datetime

    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    from diloco_cloud.outer import OuterSGD

    torch.set_num_threads(1)
    model, _ = build(job)
    opt = inner_optimizer(model)
    outer = OuterSGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = datetime.timedelta(seconds=60)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=job.world_size,
        use_async_quorum=False,
        timeout=limit,
        replica_id=f"replica{rank}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        init_sync=False,
    )
    weights: list[list[torch.Tensor]] = []
    try:
        with DiLoCo(
            manager,
            [model],
            opt,
            outer,
            sync_every=job.sync_every,
            fragment_sync_delay=job.delay,
            fragment_update_alpha=job.alpha,
        ):
            for t in range(job.steps):
                inner_step(job, model, opt, rank, t)
                weights.append([p.detach().clone() for p in model.parameters()])
    finally:
        manager.shutdown(wait=False)
    return {"weights": weights}


def by_hand(job: Job) -> dict[str, Any]:
    """The same run as a plain loop over replicas: DiLoCo as its papers write it.

    arXiv:2311.08105 (Algorithm 1) with one fragment, arXiv:2501.18512 (Algorithm 2) with several,
    a delay and a mixing factor.
    """
    torch.set_num_threads(1)
    first, _ = build(job)
    models = [copy.deepcopy(first) for _ in range(job.world_size)]
    opts = [inner_optimizer(model) for model in models]
    cuts = [_cut(job, model) for model in models]
    theta = [[p.detach().clone() for p in cut] for cut in cuts[0]]
    momentum: list[list[torch.Tensor | None]] = [[None] * len(cut) for cut in cuts[0]]
    interval = job.sync_every // job.fragments
    losses: list[list[float]] = [[] for _ in models]
    sent: list[list[torch.Tensor]] = []
    rounds = 0

    def send() -> None:
        f = rounds % job.fragments
        for cut in cuts:
            sent.append([g - p.detach() for g, p in zip(theta[f], cut[f], strict=True)])

    def receive() -> None:
        nonlocal rounds
        f = rounds % job.fragments
        for i, start in enumerate(theta[f]):
            total = torch.zeros_like(start, dtype=torch.float32)
            for deltas in sent:
                total += deltas[i].float()
            mean = (total / len(sent)).to(start.dtype)
            old = momentum[f][i]
            buf = mean.clone() if old is None else old.mul_(0.9).add_(mean)
            momentum[f][i] = buf
            # Each product and sum rounded on its own, as on every machine.
            start.sub_((mean + buf * 0.9) * 0.7)
            for cut in cuts:
                cut[f][i].data = torch.lerp(start, cut[f][i].data, job.alpha)
        sent.clear()
        rounds += 1

    synced = [0] * job.fragments
    for t in range(job.steps):
        for rank, (model, opt) in enumerate(zip(models, opts, strict=True)):
            losses[rank].append(inner_step(job, model, opt, rank, t))
        if (t + 1) % interval == (interval - job.delay) % interval:
            send()
        if (t + 1) % interval == 0 and sent:
            synced[rounds % job.fragments] = t + 1
            receive()
    if sent:
        synced[rounds % job.fragments] = job.steps
        receive()
    for _ in range(job.fragments):
        if synced[rounds % job.fragments] == job.steps:
            break
        send()
        receive()
    return {
        "losses": losses,
        "globals": [p for part in theta for p in part],
        "momentum": [
            {f"{i}.momentum_buffer": b for i, b in enumerate(part) if b is not None}
            for part in momentum
        ],
        "rounds": rounds,
    }


def _cut(job: Job, model: nn.Module) -> list[list[nn.Parameter]]:
    """Parameters of ``model`` by fragment."""
    if job.fragments == 1:
        return [list(model.parameters())]
    if job.model == "mlp":
        return [list(part.parameters()) for part in (model.a, model.b, model.c)]
    layers = model.model.layers
    first = nn.ModuleList([model.model.embed_tokens, layers[0], model.model.norm])
    return [list(part.parameters()) for part in (first, layers[1], layers[2])]
