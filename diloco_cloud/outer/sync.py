"""One sync: the tensors of all its allreduce calls, exchanged as one round in the background."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait

import torch

from diloco_cloud.exchange.background import in_background
from diloco_cloud.exchange.host import HostCopies, write_back
from diloco_cloud.exchange.work import RoundResult
from diloco_cloud.outer.work import _ImmediateWork


class Sync:
    """Collects tensors, sends them once, and writes the agreed means back into them.

    Args:
        exchange: runs a round with the collected tensors on the host, in a thread of its own.
        contribute: contributes them and leaves the decision to the others.
        is_contributed: whether the exchange under way has got so far.
        on_wait: called when the training thread begins to stand still for it.

    Attributes:
        result: what the round came to; None before, and after an error.
        error: what went wrong. It is kept rather than raised from a work's ``wait()``, where it
            would leave torchft half-way: local parameters in the model, a sync that never ends.
        seconds_blocked: time the training thread stood still for it.
        seconds_exchange: time the exchange took.
    """

    def __init__(
        self,
        exchange: Callable[[list[torch.Tensor]], RoundResult],
        *,
        contribute: Callable[[list[torch.Tensor]], object] = lambda _tensors: None,
        is_contributed: Callable[[], bool] = lambda: False,
        on_wait: Callable[[], object] = lambda: None,
    ) -> None:
        self._exchange = exchange
        self._contribute = contribute
        self._is_contributed = is_contributed
        self._on_wait = on_wait
        self._tensors: list[torch.Tensor] = []
        self._copies = HostCopies()
        self._host: list[torch.Tensor] = []
        self._under_way: Future[RoundResult] | None = None
        self._delivered = False
        self.result: RoundResult | None = None
        self.error: Exception | None = None
        self.seconds_blocked = 0.0
        self.seconds_exchange = 0.0

    @property
    def sent(self) -> bool:
        """Whether the round has begun, after which no tensor can be added."""
        return self._under_way is not None

    def add(self, tensor: torch.Tensor) -> _ImmediateWork:
        """Take ``tensor`` in; ``wait()`` of the returned work fills in the mean."""
        self._tensors.append(tensor.detach())
        # The copy off an accelerator begins here, after what the stream that torchft has made
        # current was given. torchft keeps the tensor as it is until the sync ends.
        self._host.append(self._copies.add(tensor))
        return _ImmediateWork(self.deliver)

    def send(self) -> None:
        """Begin the round, once."""
        if self._under_way is None:
            self._under_way = in_background(self._run, "diloco-exchange")

    def contribute(self) -> None:
        """See that the tensors are in the store, and wait for nothing else."""
        if self._under_way is None:
            self._copies.wait()
            self._contribute(self._host)
            return
        while not self._is_contributed() and not self._under_way.done():
            wait([self._under_way], timeout=0.02)

    def deliver(self) -> None:
        """Wait for the round and write the means into the tensors, once."""
        if self._delivered:
            return
        self._on_wait()
        began = time.perf_counter()
        try:
            self.send()
            assert self._under_way is not None
            self.result = self._under_way.result()
            # After a discard there are no means, and torchft drops the tensors.
            if self.result.tensors is not None:
                write_back(self._tensors, self.result.tensors)
        except Exception as error:
            self.error = error
        self._delivered = True
        self.seconds_blocked = time.perf_counter() - began

    def _run(self) -> RoundResult:
        began = time.perf_counter()
        try:
            self._copies.wait()
            return self._exchange(self._host)
        finally:
            self.seconds_exchange = time.perf_counter() - began
