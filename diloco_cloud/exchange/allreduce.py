"""All-reduce by an object store: the seeds' interface over the round protocol.

store = ObjectStoreAllReduce("s3://bucket/run", rank=0, world_size=4)
store.allreduce(tensor)         # every replica ends with the same mean, to the bit
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import overload

import torch

from diloco_cloud.exchange import keys
from diloco_cloud.exchange.agreement import Clock
from diloco_cloud.exchange.rounds import RoundExchange
from diloco_cloud.store import open_store
from diloco_cloud.store.base import ObjectStore
from diloco_cloud.store.metered import MeteredStore


class ObjectStoreAllReduce:
    """One rank's door to the rounds below a prefix.

    Args:
        uri: the run's prefix: ``s3://``, ``gs://``, ``az://``, ``file://``, any fsspec URI, or a
            path. A prefix serves one run; a second run in it is refused at its first round.
        rank: 0-based, below ``world_size``.
        world_size: replicas whose contributions make a round.
        round_id: number of the first round; 0 by default.
        timeout_s: seconds a round waits for peers.
        poll_interval_s: longest pause between two looks at the store; the pauses begin at 10 ms
            and grow with the wait.
        join_timeout_s: seconds the first round waits; by default as ``timeout_s``.
        attempt: which life of the rank this is; by default ``DILOCO_ATTEMPT``, or 0.
        reduction: "all-gather", "sharded", or "auto" by payload and world size.
        store: an open store to use instead of opening ``uri``.
        clock: what waiting is measured with.

    Raises:
        ValueError: ``rank`` is outside ``[0, world_size)``.
        MissingDependencyError: the package for the URI's scheme is absent (a RuntimeError).
    """

    def __init__(
        self,
        uri: str,
        rank: int,
        world_size: int,
        *,
        round_id: int | None = None,
        timeout_s: float = 1800.0,
        poll_interval_s: float = 1.0,
        join_timeout_s: float | None = None,
        attempt: int | None = None,
        reduction: str = "auto",
        store: ObjectStore | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank {rank} is outside [0, {world_size}): every replica needs a rank of its own"
            )
        self.uri = os.fspath(uri).rstrip("/") + "/"
        self.rank = rank
        self.world_size = world_size
        #: The run's prefix; ``store`` is the same, metered, and used by rounds alone.
        self.prefix = open_store(uri) if store is None else store
        self.store = MeteredStore(self.prefix)
        self.exchange = RoundExchange(
            store=self.store,
            run=self.uri.rstrip("/").rpartition("/")[2],
            rank=rank,
            world_size=world_size,
            attempt=int(os.environ.get("DILOCO_ATTEMPT", "0")) if attempt is None else attempt,
            timeout_s=timeout_s,
            join_timeout_s=timeout_s if join_timeout_s is None else join_timeout_s,
            poll_interval_s=poll_interval_s,
            reduction=reduction,
            clock=Clock() if clock is None else clock,
        )
        self._round_counter = 0 if round_id is None else round_id

    @property
    def round_id(self) -> int:
        """Number of the next round."""
        return self._round_counter

    @overload
    def allreduce(self, tensor: torch.Tensor, *, name: str | None = None) -> torch.Tensor: ...

    @overload
    def allreduce(
        self, tensor: Sequence[torch.Tensor], *, name: Sequence[str] | None = None
    ) -> list[torch.Tensor]: ...

    def allreduce(
        self,
        tensor: torch.Tensor | Sequence[torch.Tensor],
        *,
        name: str | Sequence[str] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Replace ``tensor`` by its mean over the replicas, and return it.

        One call is one round and one object, whether for a tensor or a list of them. Blocks until
        every replica has contributed. dtype and device stay; the mean is taken in fp32.

        Args:
            tensor: a tensor or a list; fp32, bf16, fp16 or fp64, on any device.
            name: what the tensor (or each tensor of the list) is called; replicas whose names
                differ are told so instead of averaging unlike things.

        Raises:
            TimeoutError: a peer did not contribute in time.
            LayoutMismatchError: replicas contributed other names, shapes or dtypes.
            ValueError: some contribution has NaN or infinite values in every replica.
        """
        single = isinstance(tensor, torch.Tensor)
        tensors = [tensor] if isinstance(tensor, torch.Tensor) else list(tensor)
        names = [name] if isinstance(name, str) else name
        if self.world_size > 1:
            self._reduce([t.detach() for t in tensors], names)
        self._round_counter += 1
        return tensors[0] if single else tensors

    def _reduce(self, tensors: list[torch.Tensor], names: Sequence[str] | None) -> None:
        round_ = self._round_counter
        result = self.exchange.exchange(round_, 0, tensors, names=names)
        if result.tensors is None:
            raise ValueError(f"round {round_}: nothing to average: {result.commit.reason}")
        for tensor, reduced in zip(tensors, result.tensors, strict=True):
            tensor.copy_(reduced)
        # Everyone who contributed to this round has read the last one.
        if round_ > 0 and self.rank == result.commit.contributors[0].rank:
            discard_round(self.store, round_ - 1, 0)


def discard_round(store: ObjectStore, round_: int, fragment: int) -> None:
    """Delete all objects of a round that nobody can need any more."""
    store.delete_many([info.key for info in store.list(keys.directory(round_, fragment))])
