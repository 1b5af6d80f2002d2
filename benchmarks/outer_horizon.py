"""Which outer step is best for how many rounds, and what averaging directions is worth.

    python benchmarks/outer_horizon.py [--task text] [--minutes 30]

N replicas train in this process, each with its own data and the default trainer's inner optimizer
and schedule (AdamW; warm-up, then cosine); after every H inner steps their pseudo-gradients are
merged by the library's own functions, and its outer optimizer steps. All arms of a row of the
tables see the same tokens in the same order; each is trained with several inner learning rates, of
which its best counts, since a momentum can stand in for inner steps that are too short.

Results go into results/outer_horizon.jsonl as they come; called again, also several times
at once for different tasks, the program goes on with what is missing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from horizon_page import TITLE, page
from horizon_tasks import TASKS, task
from measured import RESULTS, machine, write
from stacked_adamw import StackedAdamW
from torch.func import vmap

from diloco_cloud.exchange import merging
from diloco_cloud.exchange.weighting import mean_norms
from diloco_cloud.outer.embeddings import are_embeddings
from diloco_cloud.outer.sgd import OuterSGD
from diloco_cloud.trainers.inner import InnerSchedule

NAME = "outer_horizon"
ARMS = RESULTS / f"{NAME}.jsonl"

#: By task, outer learning rates and momenta.
OUTER = {
    "language": ((1.0, 0.0), (1.0, 0.5), (0.4, 0.9), (0.7, 0.9)),
    "text": ((1.0, 0.0), (0.4, 0.9), (0.7, 0.9)),
}
#: Highest inner learning rates that are tried.
PEAKS = {"language": (1e-2, 2e-2, 4e-2), "text": (3e-3, 6e-3)}
#: By task, (rounds, sync_every, replicas, merge, seeds).
ROWS = {
    "language": [
        *((rounds, 20, 4, "mean", 2) for rounds in (10, 30, 100)),
        (300, 20, 4, "mean", 1),
        *((rounds, 5, 4, "mean", 1) for rounds in (100, 300, 1000)),
        *((rounds, 20, 4, "rda", 1) for rounds in (10, 30, 100)),
        *((rounds, 20, 8, "mean", 1) for rounds in (10, 30)),
        *((rounds, 20, 8, "rda", 1) for rounds in (10, 30)),
    ],
    "text": [
        (10, 20, 4, "mean", 2),
        (30, 20, 4, "mean", 2),
        (30, 20, 4, "rda", 1),
        (100, 20, 4, "mean", 1),
    ],
}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One training to its end.

    Attributes:
        task: "language" or "text".
        rounds: outer steps.
        sync_every: inner steps in each.
        replicas: that are merged.
        merge: "mean" or "rda".
        lr, momentum: of the outer SGD; Nesterov's wherever there is momentum.
        peak: highest inner learning rate.
        seed: of weights, data and batches.
    """

    task: str
    rounds: int
    sync_every: int
    replicas: int
    merge: str
    lr: float
    momentum: float
    peak: float
    seed: int


def groups(name: str) -> Iterator[list[Arm]]:
    """All that is to be known of a task; the arms of a group see the same data."""
    for rounds, sync_every, replicas, merge, seeds in ROWS[name]:
        for seed, peak in itertools.product(range(seeds), PEAKS[name]):
            yield [
                Arm(
                    task=name,
                    rounds=rounds,
                    sync_every=sync_every,
                    replicas=replicas,
                    merge=merge,
                    lr=lr,
                    momentum=momentum,
                    peak=peak,
                    seed=seed,
                )
                for lr, momentum in OUTER[name]
            ]


def merged(
    contributions: Sequence[Sequence[torch.Tensor]], merge: str, plain: Sequence[bool]
) -> list[torch.Tensor]:
    """One pseudo-gradient of all replicas', as the exchange makes it."""
    if merge == "mean":
        return _mean(contributions)
    pairs = [merging.directions(tensors, plain) for tensors in contributions]
    mean = _mean([tensors for tensors, _ in pairs])
    merging.rescale(mean, mean_norms([norms for _, norms in pairs], [1.0] * len(pairs)))
    return mean


def _mean(contributions: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(column).mean(0) for column in zip(*contributions, strict=True)]


def simulate(arms: Sequence[Arm]) -> list[float]:
    """Losses of the merged models at the end, in nats per token.

    All arms are trained at once: small models cost their overhead, not their arithmetic.
    """
    arm = arms[0]
    job = task(arm.task, arm.seed, arm.replicas)
    names, begin = zip(*job.model.named_parameters(), strict=True)
    plain = are_embeddings([job.model], begin)
    outers = [
        OuterSGD(
            [p.detach().clone().requires_grad_() for p in begin],
            lr=arm.lr,
            momentum=arm.momentum,
            nesterov=arm.momentum > 0,
        )
        for arm in arms
    ]
    shared = [outer.param_groups[0]["params"] for outer in outers]
    local = [torch.empty(len(arms) * arm.replicas, *p.shape).requires_grad_() for p in begin]
    # By arm and rank, over the same memory.
    ranks = [p.detach().view(len(arms), arm.replicas, *p.shape[1:]) for p in local]
    inner = StackedAdamW(local)
    losses = vmap(job.training_loss)
    steps = arm.rounds * arm.sync_every
    schedule = InnerSchedule(peak=1.0, warmup_steps=math.ceil(steps / 20), total_steps=steps)
    peaks = torch.tensor([arm.peak for arm in arms]).repeat_interleave(arm.replicas)
    for step in range(steps):
        if step % arm.sync_every == 0:
            for mine, agreed in zip(ranks, zip(*shared, strict=True), strict=True):
                mine.copy_(torch.stack([p.detach() for p in agreed])[:, None].expand_as(mine))
        batches = zip(*(job.batch(rank, step) for rank in range(arm.replicas)), strict=True)
        stacked = [torch.stack(part).repeat(len(arms), *part[0].ndim * [1]) for part in batches]
        losses(dict(zip(names, local, strict=True)), *stacked).sum().backward()
        inner.step(peaks * schedule.learning_rate(step))
        if (step + 1) % arm.sync_every == 0:
            for index, (one, outer) in enumerate(zip(arms, outers, strict=True)):
                _outer_step(one.merge, shared[index], [p[index] for p in ranks], plain)
                outer.step()
    return [job.loss(dict(zip(names, parameters, strict=True))) for parameters in shared]


def _outer_step(
    merge: str,
    shared: Sequence[torch.Tensor],
    replicas: Sequence[torch.Tensor],
    plain: Sequence[bool],
) -> None:
    """Make the merged pseudo-gradients the gradients of the shared parameters.

    Args:
        merge: "mean" or "rda".
        shared: the global parameters.
        replicas: the replicas' own, with the rank as the first dimension.
        plain: which are averaged as they are in any case.
    """
    stacks = [s.detach() - mine for s, mine in zip(shared, replicas, strict=True)]
    contributions = list(zip(*stacks, strict=True))
    for parameter, gradient in zip(shared, merged(contributions, merge, plain), strict=True):
        parameter.grad = gradient


def known() -> dict[Arm, float]:
    """The losses so far."""
    if not ARMS.exists():
        return {}
    rows = map(json.loads, ARMS.read_text().splitlines())
    return {Arm(**row["arm"]): row["loss"] for row in rows}


def run(todo: Iterable[Sequence[Arm]], until: float) -> None:
    """Train what is not known yet, writing down each group as it ends."""
    for group in todo:
        found = known()
        arms = [arm for arm in group if arm not in found]
        if not arms:
            continue
        if time.monotonic() > until:
            print("Out of time; call again to go on.")
            return
        began = time.thread_time()
        losses = simulate(arms)
        took = f"{time.thread_time() - began:.0f} s"
        with ARMS.open("a") as file:
            for arm, loss in zip(arms, losses, strict=True):
                file.write(json.dumps({"arm": asdict(arm), "loss": loss}) + "\n")
        print(f"{arms[0]} and {len(arms) - 1} more: {took}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Outer steps by the number of rounds")
    parser.add_argument("--task", choices=TASKS, help="default: all")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no arm after them")
    arguments = parser.parse_args()
    where = machine()
    torch.set_num_threads(1)
    until = time.monotonic() + 60 * arguments.minutes
    for name in [arguments.task] if arguments.task else TASKS:
        run(groups(name), until)
    losses = [{**asdict(arm), "loss": loss} for arm, loss in known().items()]
    text, values = page(losses)
    write(NAME, TITLE, where, text, values)


if __name__ == "__main__":
    main()
