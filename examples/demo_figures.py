"""What a finished run of the demo amounts to, read from its store."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_cloud import Run, RunSpec
from diloco_cloud.errors import DilocoError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """One run's figures; lists are by rank.

    Attributes:
        spec: the run's settings.
        parameters: of the model.
        loss: of the exported model on held-out text, in nats per token.
        tokens: trained on, by all replicas together.
        bytes_sent, bytes_received, seconds_blocked: by the exchange, over the whole run.
        digests: of the final global parameters.
        training: by rank, (inner step, mean loss of the last steps) after each round.
        validation: (inner step, loss of the merged model) after each round.
    """

    spec: RunSpec
    parameters: int
    loss: float
    tokens: int
    bytes_sent: list[int]
    bytes_received: list[int]
    seconds_blocked: list[float]
    digests: list[str | None]
    training: list[list[tuple[int, float]]]
    validation: list[tuple[int, float]]

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def collect_figures(run: Run, directory: Path, windows: Tensor) -> RunFigures:
    """Read a run that has succeeded, and evaluate the model it exported.

    Args:
        run: the run.
        directory: where the exported model is put, for transformers to load.
        windows: held-out text, from :func:`held_out`.

    Raises:
        DilocoError: the run left no result.
    """
    import torch

    from diloco_cloud.trainers.inner import validation_loss

    torch.set_num_threads(1)  # a model this small gains nothing from more
    results = run.results()
    if results.manifest is None:
        raise DilocoError(f"{run.run_id} left no result", fix=f"diloco-cloud logs {run.run_id}")
    directory.mkdir(parents=True, exist_ok=True)
    for key in results.files:
        (directory / Path(key).name).write_bytes(run.store.get(key))
    returned = results.returned
    sums = _sum_rounds(run)
    first = returned[0]
    final = (first["inner_steps"], first["val_loss"])
    return RunFigures(
        spec=run.spec,
        parameters=first["parameters"],
        loss=validation_loss(load_model(directory), windows),
        tokens=sum(figures["tokens"] for figures in returned),
        digests=results.digests,
        validation=[*(point for point in sums.validation if point[0] < final[0]), final],
        bytes_sent=sums.bytes_sent,
        bytes_received=sums.bytes_received,
        seconds_blocked=sums.seconds_blocked,
        training=sums.training,
    )


def held_out(spec: RunSpec) -> Tensor:
    """The sample that the trainer of ``spec`` judges merged models on; shape (windows, tokens)."""
    from diloco_cloud.trainers.data import TextOptions, held_out_windows

    names = ("tokenizer", "vocabulary_size", "batch_size", "sequence_length")
    chosen = {name: spec.trainer_args[name] for name in (*names, "validation_sequences")}
    options = TextOptions(text=None, validation_fraction=0.1, **chosen)
    return held_out_windows(options)


def load_model(directory: Path) -> Any:
    """The exported model, as anybody would load it."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return AutoModelForCausalLM.from_pretrained(directory)


@dataclass
class _Sums:
    bytes_sent: list[int]
    bytes_received: list[int]
    seconds_blocked: list[float]
    training: list[list[tuple[int, float]]]
    validation: list[tuple[int, float]]


def _sum_rounds(run: Run) -> _Sums:
    n = run.spec.replicas
    sums = _Sums([0] * n, [0] * n, [0.0] * n, [[] for _ in range(n)], [])
    # What is reported of a merged model arrives with the metrics of the round after.
    validation: dict[int, float] = {}
    for row in run.metrics():
        rank = row["rank"]
        sums.bytes_sent[rank] += row["bytes_sent"]
        sums.bytes_received[rank] += row["bytes_received"]
        sums.seconds_blocked[rank] += row["seconds_blocked"]
        sums.training[rank].append((row["inner_step"], row["train_loss"]))
        if "val_loss" in row:
            validation[int(row["val_step"])] = row["val_loss"]
    sums.validation = sorted(validation.items())
    return sums
