"""What a computation holds in memory: counted tensor by tensor, and as the kernel sees it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import process_meters
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Makes inputs; the result computes a loss of them.
Prepare = Callable[[], Callable[[], torch.Tensor]]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operators have made and that are still alive.

    What a kernel allocates for itself and frees before it returns is not seen: the count is a lower
    bound. It holds for fake tensors too, which have shapes and no memory.

    Attributes:
        now: bytes alive.
        peak: the most that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        # Views share a storage; torch keeps its Python object as long as the storage itself.
        key, size = id(storage), storage.nbytes()
        if key in self._alive:
            return

        def gone(_: Any) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True)
class Peak:
    """Of one forward and backward pass, inputs and gradients included.

    Attributes:
        counted: bytes, by :class:`LiveBytes`.
        resident: bytes that the process's memory grew by at most.
        loss: for the check that contenders compute the same.
    """

    counted: int
    resident: int
    loss: float


def counted_peak(prepare: Prepare) -> int:
    """Bytes that a pass would need, by shapes alone: nothing is computed or allocated."""
    with FakeTensorMode(), LiveBytes() as live:
        prepare()().backward()
    return live.peak


def measured_peak(prepare: Prepare) -> Peak:
    """Run a pass and see what it held; whatever libraries load or pool should be there before."""
    gc.collect()
    process_meters.reset_peak_memory()
    before = process_meters.memory()
    with LiveBytes() as live:
        loss = prepare()()
        loss.backward()
    return Peak(live.peak, process_meters.peak_memory() - before, loss.item())


@contextmanager
def first_to_be_killed() -> Iterator[None]:
    """Should memory run out after all, it is this process that goes, and no neighbour."""
    path = Path("/proc/self/oom_score_adj")
    before = path.read_text()
    path.write_text("1000")
    try:
        yield
    finally:
        path.write_text(before)
