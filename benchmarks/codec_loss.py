"""What each codec costs in loss: one toy, trained on equal tokens, through the real codecs.

    python benchmarks/codec_loss.py [--arms ARM …] [--seeds 0 1] [--rounds 200] [--sync-every 10]

Four replicas train the default trainer's kind of model, a byte-level transformer on the standard
library's sources, in one process and on one thread. A round is what a sharded one is: each
contribution is encoded, with its feedback where the codec wants it; the mean is taken of the
encoded ones; its sum is encoded as the codec says (``Codec.sums``); the outer step is plain
averaging. All arms of a seed begin with the same weights and meet the same batches.

Training amplifies the smallest difference, so two arms differ even where their codecs do not: how
much, the arm tells that is fp32 with the same weights and text, but other batches from it.

A run that was stopped goes on with the arms that are missing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import measured
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from diloco_cloud.exchange.codecs import get_codec
from diloco_cloud.exchange.codecs.base import Codec
from diloco_cloud.exchange.codecs.feedback import Feedback
from diloco_cloud.trainers.data import ReplicaData, TextOptions, prepare_data
from diloco_cloud.trainers.inner import (
    InnerSchedule,
    compute_gradients,
    make_optimizer,
    validation_loss,
)
from diloco_cloud.trainers.model import ModelShape, build_model

REPLICAS: Final = 4
SHAPE: Final = ModelShape(
    architecture="llama",
    vocabulary_size=257,
    sequence_length=64,
    hidden_size=64,
    layers=2,
    heads=4,
    intermediate_size=192,
    tie_embeddings=True,
)
TEXT: Final = TextOptions(
    text=None,
    tokenizer="byte",
    vocabulary_size=257,
    batch_size=8,
    sequence_length=64,
    validation_fraction=0.1,
    validation_sequences=2048,
)
PEAK_LR: Final = 2e-3


@dataclass(frozen=True)
class Arm:
    """One way to exchange.

    Attributes:
        codec: of the contributions.
        feedback: whether a codec that wants it has error feedback.
        batches: another number draws other batches from the same text.
    """

    codec: str
    feedback: bool = True
    batches: int = 0


ARMS: Final = {
    "fp32": Arm("fp32"),
    "e3m0": Arm("e3m0"),
    "sparse": Arm("sparse"),
    "sparse, no feedback": Arm("sparse", feedback=False),
    "int8": Arm("int8"),
    "bf16": Arm("bf16"),
    "fp32, other batches": Arm("fp32", batches=1),
    "e2m1": Arm("e2m1"),
}


@dataclass(frozen=True)
class Length:
    """How long an arm trains."""

    rounds: int
    sync_every: int

    @property
    def schedule(self) -> InnerSchedule:
        """Of the inner learning rate."""
        steps = self.rounds * self.sync_every
        return InnerSchedule(peak=PEAK_LR, warmup_steps=steps // 20, total_steps=steps)


class Replica:
    """A model of its own, its optimizer, its text, and what it has not sent yet."""

    def __init__(self, data: ReplicaData, arm: Arm, seed: int, schedule: InnerSchedule) -> None:
        self.model = build_model(SHAPE, seed=seed)
        self._optimizer = make_optimizer(self.model, weight_decay=0.1)
        self._schedule = schedule
        self._sampler = replace(data.sampler, seed=data.sampler.seed + 1000 * arm.batches)
        codec = get_codec(arm.codec)
        wanted = arm.feedback and codec.decay is not None
        self._feedback = Feedback(self.parameters().numel(), codec.decay or 1) if wanted else None

    def parameters(self) -> torch.Tensor:
        """All of them, shape (parameters,)."""
        return parameters_to_vector(self.model.parameters()).detach()

    def train(self, steps: range) -> None:
        """Some inner steps."""
        for step in steps:
            compute_gradients(
                self.model,
                self._optimizer,
                self._sampler.batch(step),
                learning_rate=self._schedule.learning_rate(step),
                gradient_clip=1.0,
            )
            self._optimizer.step()

    def contribute(self, codec: Codec, shared: torch.Tensor) -> memoryview:
        """The encoded pseudo-gradient."""
        delta = shared - self.parameters()
        if self._feedback is None:
            return codec.encode(delta)
        data = codec.encode(self._feedback.added_to(delta, 0))
        self._feedback.settle(delta, 0, codec, data)
        return data

    def adopt(self, shared: torch.Tensor) -> None:
        """Take over the merged parameters."""
        vector_to_parameters(shared.clone(), self.model.parameters())


def merged(codec: Codec, contributions: Sequence[memoryview], numel: int) -> torch.Tensor:
    """What every replica has after a sharded round: the mean, as its sum travelled."""
    mean = codec.mean(numel)
    for data in contributions:
        mean.add(data, 1.0)
    if codec.sums in ("raw", ""):
        return mean.result()
    carrier = get_codec(codec.sums)
    return carrier.decode(carrier.encode(mean.result()), numel)


def run(arm: Arm, seed: int, length: Length, data: Sequence[ReplicaData]) -> dict[str, float]:
    """Train; the merged model's loss in nats per byte, and bits sent per parameter and round."""
    codec = get_codec(arm.codec)
    replicas = [Replica(one, arm, seed, length.schedule) for one in data]
    shared = replicas[0].parameters()
    sent = 0
    for round_ in range(length.rounds):
        steps = range(round_ * length.sync_every, (round_ + 1) * length.sync_every)
        for replica in replicas:
            replica.train(steps)
        contributions = [replica.contribute(codec, shared) for replica in replicas]
        sent += sum(map(len, contributions))
        shared = shared - merged(codec, contributions, len(shared))
        for replica in replicas:
            replica.adopt(shared)
    loss = validation_loss(replicas[0].model, data[0].validation, batch_size=64)
    return {"loss": loss, "bits": 8 * sent / (length.rounds * len(replicas) * len(shared))}


def missing(
    arms: Sequence[str], seeds: Sequence[int], length: Length, known: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """What identifies each arm that has not been run."""
    for name in arms:
        for seed in seeds:
            which = {"arm": name, "seed": seed, **asdict(length)}
            if not any(which.items() <= one.items() for one in known):
                yield which


def page(runs: Sequence[Mapping[str, Any]], length: Length) -> str:
    """Losses, and how far each arm is from fp32 on the same seed."""
    ours = [one for one in runs if asdict(length).items() <= one.items()]
    losses = {(one["arm"], one["seed"]): one["loss"] for one in ours}
    seeds = sorted({one["seed"] for one in ours if ("fp32", one["seed"]) in losses})
    rows = []
    for name in ARMS:
        has = [seed for seed in seeds if (name, seed) in losses]
        if not has:
            continue
        apart = [100 * (losses[name, s] / losses["fp32", s] - 1) for s in has]
        bits = statistics.mean(one["bits"] for one in ours if one["arm"] == name)
        row = [f"{losses[name, s]:.4f}" if s in has else "" for s in seeds]
        rows.append([name, f"{bits:.4g}", *row, f"{statistics.mean(apart):+.2f} %", _signed(apart)])
    steps = length.rounds * length.sync_every
    fp32 = [losses["fp32", seed] for seed in seeds]
    spread = 100 * statistics.stdev(fp32) / statistics.mean(fp32) if len(fp32) > 1 else None
    noise = (
        "One seed so far: how much chance moves the loss, only the arm with other batches tells."
        if spread is None
        else f"fp32 differs by {spread:.2f} % (standard deviation) between seeds, which have other "
        "weights, shards and batches."
    )
    header = ["arm", "bits", *(f"seed {s}" for s in seeds), "to fp32", "by seed, %"]
    return (
        f"{REPLICAS} replicas, {length.rounds} rounds of {length.sync_every} steps, averaged "
        f"(outer rate 1, no momentum); {REPLICAS * steps * 8 * 64 / 1e6:.1f} M bytes of text in "
        "each arm. Held-out loss of the merged model in nats per byte; bits sent per parameter "
        "and round.\n\n"
        f"{measured.table(header, rows)}\n\n{noise}"
    )


def _signed(values: Sequence[float]) -> str:
    return " ".join(f"{value:+.2f}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description="Loss by codec")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--sync-every", type=int, default=10)
    arguments = parser.parse_args()
    where = measured.machine()
    torch.set_num_threads(1)
    length = Length(arguments.rounds, arguments.sync_every)
    file = measured.RESULTS / "codec_loss.json"
    runs: list[dict[str, Any]] = json.loads(file.read_text())["runs"] if file.exists() else []
    data: dict[int, list[ReplicaData]] = {}
    for which in missing(arguments.arms, arguments.seeds, length, runs):
        seed = which["seed"]
        if seed not in data:
            data[seed] = [
                prepare_data(TEXT, rank=rank, world_size=REPLICAS, seed=seed)
                for rank in range(REPLICAS)
            ]
        began = time.monotonic()
        result = run(ARMS[which["arm"]], seed, length, data[seed])
        runs.append({**which, **result, "seconds": round(time.monotonic() - began)})
        file.write_text(json.dumps({"runs": runs}))
    measured.write("codec_loss", "Loss by codec", where, page(runs, length), {"runs": runs})


if __name__ == "__main__":
    main()
