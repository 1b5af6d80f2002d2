"""Train functions that are told to end, and what they make of it."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diloco_cloud.outer import make_diloco_outer_loop

#: Steps that no test waits for.
ENDLESS = 10**6


def steps(*, manager: Any, rank: int, world_size: int, swallow: bool = False) -> str | None:
    """Train with the real outer loop, for ever."""
    try:
        _train(manager)
    except SystemExit:
        if not swallow:
            raise
    return "never heard"


def wishing(*, manager: Any, rank: int, world_size: int) -> None:
    """End by its own wish, as on a provider's spot notice."""
    threading.Timer(1.0, manager.request_hand_over).start()
    _train(manager)


def _train(manager: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with make_diloco_outer_loop(manager, [model], optimizer, sync_every=ENDLESS):
        for step in range(ENDLESS):
            model(torch.randn(4, 8)).square().mean().backward()
            manager.report(tokens=10)
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                Path("training").touch()
            time.sleep(0.02)


def preparing(*, manager: Any, rank: int, world_size: int) -> None:
    """Read data, for ever."""
    Path("training").touch()
    time.sleep(300)


def computing(*, manager: Any, rank: int, world_size: int) -> None:
    """After a step, begin a call into C that takes long, and that no signal interrupts."""
    manager.report(tokens=1)
    Path("training").touch()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)


def sleeping(*, manager: Any, rank: int, world_size: int) -> None:
    """After a step, begin a call into C that takes long."""
    manager.report(tokens=1)
    Path("training").touch()
    try:
        time.sleep(300)
    finally:
        Path("unwound").touch()


def finishing(*, manager: Any, rank: int, world_size: int) -> str:
    """Complete the training while the grace lasts."""
    manager.report(tokens=1)
    Path("training").touch()
    while not manager.is_handing_over:
        time.sleep(0.01)
    return "complete"


def breaking(*, manager: Any, rank: int, world_size: int) -> None:
    """Fail because of the end, as one whose helpers are told to end with it."""
    manager.report(tokens=1)
    Path("training").touch()
    while not manager.is_handing_over:
        time.sleep(0.01)
    raise RuntimeError("a data loader's worker was terminated")


def elsewhere(*, manager: Any, rank: int, world_size: int) -> None:
    """Train in a thread, as some frameworks do."""
    thread = threading.Thread(target=_train, args=(manager,), daemon=True)
    thread.start()
    thread.join()
    Path("joined").touch()
    time.sleep(300)
