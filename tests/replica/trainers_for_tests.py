"""Train functions that the entrypoint's tests name by module and function."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from diloco_cloud import keys
from diloco_cloud.errors import ConfigError, NotFoundError, UnreachableError
from diloco_cloud.store.base import Data
from diloco_cloud.store.directory import DirectoryStore


def echo(*, manager: Any, rank: int, world_size: int, **kwargs: Any) -> dict[str, Any]:
    return {"rank": rank, "world_size": world_size, "step": manager.current_step(), **kwargs}


def narrow(*, manager: Any, rank: int, world_size: int, sync_every: int, own: str) -> list[Any]:
    return [rank, world_size, sync_every, own]


def average(*, manager: Any, rank: int, world_size: int) -> float:
    manager.start_quorum()
    tensor = torch.tensor([float(rank)])
    manager.report(tokens=5, loss=0.5, accuracy=0.25)
    manager.allreduce(tensor).wait()
    manager.should_commit()
    return float(tensor)


def talk(*, manager: Any, rank: int, world_size: int) -> None:
    print("printed")  # noqa: T201
    logging.getLogger("mine").info("logged %s", "line")
    warnings.warn("careful", stacklevel=1)


def crash(*, manager: Any, rank: int, world_size: int) -> None:
    raise ValueError("the model exploded\nsecond line")


def misused(*, manager: Any, rank: int, world_size: int) -> None:
    raise ConfigError("no data there", fix="Name another folder.")


def exhausted(*, manager: Any, rank: int, world_size: int) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB")


def cut_off(*, manager: Any, rank: int, world_size: int) -> None:
    raise UnreachableError("the store does not answer")


def environment(*, manager: Any, rank: int, world_size: int) -> list[str]:
    return sorted(os.environ)


def wait_for_beats(*, manager: Any, rank: int, world_size: int, beats: int) -> None:
    """Return when that many different heartbeats have been seen."""
    seen: set[bytes] = set()
    deadline = time.monotonic() + 60
    while len(seen) < beats:
        assert time.monotonic() < deadline
        with contextlib.suppress(NotFoundError):
            seen.add(manager.prefix.get(keys.alive(rank)))
        manager.report(tokens=1)
        time.sleep(0.01)


def leave(*, manager: Any, rank: int, world_size: int, code: Any) -> None:
    sys.exit(code)


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("never asked")


def odd_result(*, manager: Any, rank: int, world_size: int) -> Any:
    return Unspeakable()


def chatter(*, manager: Any, rank: int, world_size: int) -> str:
    for number in range(200):
        print(f"line {number} {'x' * 1000}", flush=True)  # noqa: T201
    return "done"


def long(*, manager: Any, rank: int, world_size: int, stuck: str | None = None) -> None:
    """Take a step now and then, for ever; writes to keys that start with ``stuck`` never end."""
    if stuck is not None:
        put = DirectoryStore.put

        def hang(self: DirectoryStore, key: str, data: Data) -> None:
            if key.startswith(stuck):
                Path("stuck").touch()
                time.sleep(300)
            put(self, key, data)

        DirectoryStore.put = hang  # type: ignore[method-assign]
        # Like a snapshot's upload: in a thread that the interpreter joins at exit.
        ThreadPoolExecutor(1).submit(manager.prefix.put, f"{stuck}big", b"")
    Path("training").touch()
    while True:
        manager.report(tokens=1)
        time.sleep(0.05)


def stubborn(*, manager: Any, rank: int, world_size: int) -> str:
    """Swallow whatever is raised."""
    try:
        long(manager=manager, rank=rank, world_size=world_size)
    except BaseException:
        return "never heard"
    return "unreachable"


def lingering(*, manager: Any, rank: int, world_size: int) -> None:
    """Take for ever to tidy up."""
    try:
        long(manager=manager, rank=rank, world_size=world_size)
    finally:
        Path("lingering").touch()
        time.sleep(300)


def _work() -> None:
    time.sleep(300)


def forking(*, manager: Any, rank: int, world_size: int) -> list[int | None]:
    """End workers as a data loader does, some of them before they have begun."""
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_work) for _ in range(20)]
    for worker in workers:
        worker.start()
        worker.terminate()
        worker.join(60)
    return sorted({worker.exitcode for worker in workers})


not_callable = 3
