"""How long training stands still for the exchange, with and without overlap.

    python benchmarks/overlap.py [--rounds 12]

Four replicas, each behind a link of its own, on which an exchange takes about half as long as a
round's training; an inner step is a pause, as on an accelerator, and a real optimizer step. Blocked
is what the training thread waits for the exchange, as the metrics of every round report it (an
exchange that runs beside the training blocks it only if it is late), as part of the wall time of
all rounds but the first two, in which links and arrivals are not known yet. Then the same over 10
Mbit/s, where an exchange takes much longer than the training it runs beside.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import measured
import torch
from torch import nn

from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.exchange.layout import digest_tensors
from diloco_cloud.outer import MockManager, make_diloco_outer_loop
from diloco_cloud.outer.progress import RoundReport
from diloco_cloud.store import open_store
from diloco_cloud.store.base import ObjectStore, buffers

REPLICAS: Final = 4
MIB: Final = 2**20
WARM_UP: Final = 2
LATENCY_S: Final = 0.03


class Link:
    """One direction of a replica's line: transfers that are under way share its rate."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0
        self._lock = threading.Lock()

    def carry(self, nbytes: int) -> None:
        """Return when so many bytes have passed."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._rate
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()) + LATENCY_S)


class LinkedStore:
    """A store at the other end of a link."""

    def __init__(self, inner: ObjectStore, rate: float) -> None:
        self._inner, self._up, self._down = inner, Link(rate), Link(rate)

    def __getattr__(self, name: str) -> Any:
        method: Callable[..., Any] = getattr(self._inner, name)
        if name in ("create", "put"):

            def write(key: str, data: Any) -> None:
                self._up.carry(sum(map(len, buffers(data))))
                method(key, data)

            return write
        if name in ("get", "get_range"):

            def read(*args: Any) -> Any:
                found = method(*args)
                self._down.carry(len(found))
                return found

            return read
        return method


@dataclass(frozen=True)
class Setting:
    """One run.

    Attributes:
        name: for the table.
        rate: bytes per second of each link, each way.
        fragments: of the model; each is synchronised every ``sync_every`` steps.
        delay: inner steps that an exchange runs beside.
        mib: of the model.
    """

    name: str
    rate: float
    fragments: int = 1
    delay: int = 0
    mib: int = 16
    sync_every: int = 40
    step_s: float = 0.05
    rounds: int = 12


def replica(setting: Setting, rank: int, uri: str) -> tuple[list[RoundReport], float, str]:
    """Train; returns the rounds' reports, seconds from the warm-up's end on, and a digest."""
    store = LinkedStore(open_store(uri), setting.rate)
    door = ObjectStoreAllReduce(uri, rank, REPLICAS, store=store)  # type: ignore[arg-type]
    reports: list[RoundReport] = []
    manager = MockManager(door, snapshot_every=1000, on_round=reports.append)
    size = setting.mib * MIB // 4 // setting.fragments
    model = nn.ModuleList([nn.ParameterList([torch.zeros(size)]) for _ in range(setting.fragments)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    began = 0.0
    loop = make_diloco_outer_loop(
        manager,
        list(model),
        optimizer,
        sync_every=setting.sync_every,
        fragment_sync_delay=setting.delay,
    )
    with loop:
        while len(reports) < setting.rounds:
            if len(reports) == WARM_UP and not began:
                began = time.monotonic()
            with step(setting.step_s):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 1.0 + rank)
            manager.report(tokens=1000)
            optimizer.step()
        seconds = time.monotonic() - began
    manager.shutdown(finished=True)
    return reports[WARM_UP : setting.rounds], seconds, digest_tensors(list(model.parameters()))


@contextmanager
def step(seconds: float) -> Iterator[None]:
    """Let what is inside take as long as on an accelerator."""
    until = time.monotonic() + seconds
    yield
    time.sleep(max(0.0, until - time.monotonic()))


def run(setting: Setting) -> dict[str, Any]:
    """One run of all replicas."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(REPLICAS) as pool:
        uri = f"file://{directory}/run"
        found = list(pool.map(lambda rank: replica(setting, rank, uri), range(REPLICAS)))
    blocked = [sum(one.seconds_blocked for one in reports) for reports, _, _ in found]
    exchange = [one.seconds_exchange for reports, _, _ in found for one in reports]
    walls = [seconds for _, seconds, _ in found]
    return {
        "setting": vars(setting),
        "blocked": max(b / w for b, w in zip(blocked, walls, strict=True)),
        "exchange_s": sum(exchange) / len(exchange),
        "round_s": max(walls) / (setting.rounds - WARM_UP),
        "compute_s": setting.sync_every / setting.fragments * setting.step_s,
        "equal": len({digest for _, _, digest in found}) == 1,
    }


def settings(rounds: int) -> list[Setting]:
    """An exchange of S moves 2S(N-1)/N down, here 1.5 S; finding one another takes its time too."""
    compute_s = Setting("", 1.0).sync_every * Setting("", 1.0).step_s
    half = 1.5 * 16 * MIB / (compute_s / 3)
    slow = 10e6 / 8
    return [
        Setting("no overlap", half, rounds=rounds),
        Setting("delay", half, delay=30, rounds=rounds),
        Setting("two fragments, delay", half, fragments=2, delay=15, rounds=rounds),
        Setting("10 Mbit/s", slow, delay=30, rounds=WARM_UP + 2),
    ]


def page(found: Sequence[dict[str, Any]]) -> str:
    """The table."""
    rows = [
        [
            one["setting"]["name"],
            f"{one['setting']['rate'] * 8 / 1e6:.0f}",
            one["setting"]["fragments"],
            one["setting"]["delay"],
            f"{one['compute_s']:.2f}",
            f"{one['exchange_s']:.2f}",
            f"{one['round_s']:.2f}",
            f"**{one['blocked']:.2%}**",
            "yes" if one["equal"] else "NO",
        ]
        for one in found
    ]
    header = ["", "Mbit/s", "fragments", "delay, steps", "training, s", "exchange, s", "round, s"]
    return measured.table([*header, "blocked", "equal parameters"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time blocked by the exchange")
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    where = measured.machine()
    found = [run(setting) for setting in settings(arguments.rounds)]
    text = (
        f"{REPLICAS} replicas, 16 MiB of parameters, latency {LATENCY_S * 1000:.0f} ms a request; "
        "a round is that of one fragment.\n\n" + page(found)
    )
    measured.write("overlap", "Time blocked by the exchange", where, text, {"runs": found})


if __name__ == "__main__":
    main()
