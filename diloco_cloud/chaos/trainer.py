"""The replica of a rehearsal: a real model and real gradients, small enough to run 32 on a laptop.

A replica sleeps away what is left of its step's time, so that it is as fast as if it had an
accelerator of its own, whatever the others do; without ``step_s`` they share the machine's cores,
and whoever lives uses what the dead leave.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch.nn import functional

from diloco_cloud.chaos import LAST_STEP
from diloco_cloud.chaos.lossy import LossyUploads
from diloco_cloud.chaos.task import Language, TinyModel, batch_seed
from diloco_cloud.errors import NotFoundError
from diloco_cloud.outer import make_diloco_outer_loop
from diloco_cloud.store.base import ObjectStore

if TYPE_CHECKING:
    from torch import nn

    from diloco_cloud.outer.loop import OuterLoop
    from diloco_cloud.outer.manager import MockManager

logger = logging.getLogger(__name__)

#: Hex digits of a digest that a metric, which is a float, holds exactly.
_DIGITS: Final = 12


def train(
    *,
    manager: MockManager,
    rank: int,
    world_size: int,
    sync_every: int,
    rounds: int | None = None,
    fragments: int = 1,
    seed: int = 0,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    step_s: float = 0.0,
    slow: Mapping[str, float] | None = None,
    lose: float = 0.0,
    learning_rate: float = 3e-3,
    batch_size: int = 64,
    symbols: int = 24,
    width: int = 24,
) -> dict[str, Any]:
    """Train one replica.

    Args:
        manager: the run's manager.
        rank: of this replica.
        world_size: number of replicas.
        sync_every: inner steps between two syncs.
        rounds: outer steps of the run; None: as many as the object ``trainer/last_step`` says,
            once it is there.
        fragments: 1.
        seed: of the language and the initial weights, and with the rank of the batches.
        outer_lr: of the outer SGD.
        outer_momentum: of the outer SGD.
        nesterov: whether that momentum is Nesterov's.
        step_s: seconds that an inner step takes at least.
        slow: by rank, how many times as long its steps take.
        lose: part of each round's contributions that does not arrive.
        learning_rate: of the inner AdamW.
        batch_size: tokens of an inner step.
        symbols: of the language.
        width: of the model.

    Returns:
        The merged model's figures (see ``_Merged``), the language's entropy in nats per token, and
        the tokens and inner steps of this life.
    """
    if fragments != 1:
        raise ValueError("the model of a rehearsal is one fragment")
    language = Language.make(symbols, seed)
    torch.manual_seed(seed)
    model = TinyModel(symbols, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    outer = make_diloco_outer_loop(
        manager,
        [model],
        optimizer,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        nesterov=nesterov,
        sync_every=sync_every,
        model=model,
    )
    if lose > 0:
        exchange = manager.store.exchange
        lossy = LossyUploads(exchange.store, rank=rank, world_size=world_size, part=lose, seed=seed)
        exchange.store = cast(ObjectStore, lossy)
    pace = Pace(step_s * (slow or {}).get(str(rank), 1.0))
    end = _End(manager, rounds)
    merged = _Merged(manager, outer, language, model)
    step = outer.inner_steps_done
    first = step
    with outer:
        while outer.schedule_step < end.step * sync_every:
            pace.begin()
            contexts, following = language.batch(batch_size, seed=batch_seed(seed, rank, step))
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(contexts), following)
            loss.backward()  # type: ignore[no-untyped-call]
            pace.wait()
            manager.report(tokens=batch_size, loss=loss.item(), **merged.figures)
            optimizer.step()
            step += 1
            if manager.current_step() != merged.step:
                merged.look()
                end.look()
    merged.look()
    return {
        **merged.figures,
        "entropy": language.entropy,
        "tokens": (step - first) * batch_size,
        "inner_steps": step - first,
    }


class Pace:
    """Makes steps take their time; what is done between two steps is not part of either.

    Args:
        step_s: seconds of a step; 0: as long as it takes.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._began = time.monotonic()

    def begin(self) -> None:
        """A step begins."""
        self._began = time.monotonic()

    def wait(self) -> None:
        """Wait for the end of the step; one that took too long is not made up for."""
        left = self._began + self._step_s - time.monotonic()
        if left > 0:
            time.sleep(left)


class _End:
    """After which outer step to stop: so many, or what the run is told while it goes on.

    All replicas read the same word, and stop after the same round.
    """

    def __init__(self, manager: MockManager, rounds: int | None) -> None:
        self._manager = manager
        self.step: float = math.inf if rounds is None else rounds
        self.look()

    def look(self) -> None:
        """See whether there is word."""
        if math.isinf(self.step):
            with contextlib.suppress(NotFoundError):
                self.step = int(self._manager.prefix.get(LAST_STEP))


class _Merged:
    """What the global parameters are worth, and which they are.

    ``figures`` are "val_loss" in nats per token, after the outer step "val_step", and "val_state",
    the first digits of the digest of the global parameters: equal on all replicas.
    """

    def __init__(
        self, manager: MockManager, outer: OuterLoop, language: Language, model: nn.Module
    ) -> None:
        self._manager, self._outer = manager, outer
        self._language, self._model = language, model
        self.look()

    def look(self) -> None:
        """Take the figures anew."""
        self.step = self._manager.current_step()
        parameters, names = self._outer.global_parameters(0)
        loss = self._language.loss(self._model, dict(zip(names, parameters, strict=True)))
        digest = self._manager.global_digest() or "0"
        state = int(digest[:_DIGITS], 16)
        self.figures = {"val_loss": loss, "val_step": self.step, "val_state": state}
