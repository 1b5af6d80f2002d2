"""The design that others' object-store all-reduces have, written from its description.

Each replica puts what it has into the bucket, looks for each peer's object until it is there, reads
all of them, and takes the mean. N - 1 contributions come down each replica's link, one after the
other, however many links there are. The client library is the same as ours.

* :class:`Reference`: a tensor at a time, as pickles, with a look each second;
* :class:`OneObjectReference`: the same with all tensors in one object;
* :class:`FastReference`: raw bytes in one object, with twenty looks a second. It is what a careful
  engineer would write within the design.

Sums are kept while reading, in rank order. A stack of all N contributions would be closer to the
description, and hold N models in memory.
"""

from __future__ import annotations

import io
import time
import warnings
from collections.abc import Callable, Sequence

import torch

from diloco_cloud.errors import NotFoundError
from diloco_cloud.store.base import Data, ObjectStore


class Reference:
    """All-reduce a tensor at a time: torch.save, one PUT, a look each second, N - 1 GETs.

    Args:
        store: the shared prefix.
        rank: of this replica.
        replicas: how many there are.
        poll_s: pause between two looks for a peer's object.
    """

    def __init__(
        self, store: ObjectStore, rank: int, replicas: int, *, poll_s: float = 1.0
    ) -> None:
        self._store, self._rank, self._replicas = store, rank, replicas
        self._poll_s = poll_s
        self._rounds = 0

    def allreduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its mean over the replicas."""
        for tensor in tensors:
            self._one([tensor])

    def _one(self, tensors: Sequence[torch.Tensor]) -> None:
        directory = f"round_{self._rounds:06d}"
        self._rounds += 1
        self._store.put(f"{directory}/rank_{self._rank:04d}.pt", self._pack(tensors))
        totals = [torch.zeros_like(tensor) for tensor in tensors]
        for rank in range(self._replicas):
            if rank == self._rank:
                parts: Sequence[torch.Tensor] = tensors
            else:
                key = f"{directory}/rank_{rank:04d}.pt"
                self._await(key)
                parts = self._read(key, tensors)
            for total, part in zip(totals, parts, strict=True):
                total += part
        for tensor, total in zip(tensors, totals, strict=True):
            tensor.copy_(total.div_(self._replicas))

    def _await(self, key: str) -> None:
        while not self._is_there(key):
            time.sleep(self._poll_s)

    def _is_there(self, key: str) -> bool:
        try:
            self._store.head(key)
        except NotFoundError:
            return False
        return True

    def _pack(self, tensors: Sequence[torch.Tensor]) -> Data:
        buffer = io.BytesIO()
        torch.save(list(tensors), buffer)
        return buffer.getbuffer()

    def _read(self, key: str, _like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        loaded: list[torch.Tensor] = torch.load(io.BytesIO(self._store.get(key)))
        return loaded


class OneObjectReference(Reference):
    """The same with one object for all tensors."""

    def allreduce(self, tensors: Sequence[torch.Tensor]) -> None:
        self._one(tensors)


class FastReference(OneObjectReference):
    """The same design without its sloth: raw bytes, no copies, twenty looks a second."""

    def __init__(self, store: ObjectStore, rank: int, replicas: int) -> None:
        super().__init__(store, rank, replicas, poll_s=0.05)

    def _pack(self, tensors: Sequence[torch.Tensor]) -> Data:
        return [memoryview(tensor.numpy()).cast("B") for tensor in tensors]

    def _read(self, key: str, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        data = self._store.get_range(key, 0, sum(tensor.nbytes for tensor in like))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it cannot be written to: nor is it
            values = torch.frombuffer(data, dtype=torch.float32)
        return list(values.split([tensor.numel() for tensor in like]))


REFERENCES: dict[str, Callable[[ObjectStore, int, int], Reference]] = {
    "reference": Reference,
    "reference-one-object": OneObjectReference,
    "reference-fast": FastReference,
}
