"""Ten thousand rounds in bad weather: does anything grow, drift or get lost?

    python benchmarks/soak.py [--rounds 10000] [--out DIRECTORY]

Four processes train a tiny model over a directory that a fault-injecting store stands before: its
requests are delayed, throttled, cut off, answered twice or not at all, and its listings lag. Now
and then one process is killed with SIGKILL and started again; rank 0 is spared, so that there is
one process whose memory can be watched from the first round to the last.

Checked: after every round all replicas have the same global parameters, to the bit, and they are
those that the next decision builds on; one decision per round; every token was merged once, or died
with its process; and the prefix, the requests per round, and rank 0's memory, threads and open
files do not grow. The figures go to benchmarks/results/soak.md and soak.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from forked_checks import ViolatedError, check, merged_tokens, require
from forked_run import Companion, ForkedRun, Job

from diloco_cloud import keys
from diloco_cloud.outer import MockManager
from diloco_cloud.outer.progress import RoundReport
from diloco_cloud.store.base import ObjectStore
from diloco_cloud.store.faults import Faults, FaultyStore, weather
from diloco_cloud.store.metered import MeteredStore
from diloco_cloud.store.retry import RetryingStore, RetryPolicy

RESULTS = Path(__file__).parent / "results"
REPLICAS = 4
SAMPLES = 20
#: Rounds of a run that can tell whether anything grows.
LONG = 2_000
#: Rounds from one kill to the next, on average.
KILL_EVERY = 150
FAULTS = Faults(
    latency=0.0002,
    throttled=0.02,
    timeout=0.01,
    lost_reply=0.01,
    duplicate=0.02,
    torn=0.01,
    expired=0.002,
    stale_list=0.02,
    stale_s=0.02,
    clock_skew_s=2.0,
)
KINDS = ("throttled", "timeout", "lost_reply", "duplicate", "torn", "expired", "stale_list")
#: The product's, with waits that suit rounds of some hundredths of a second.
PATIENCE = RetryPolicy(attempts=10, base_s=0.001, cap_s=0.02)


class Observer(Companion):
    """Puts the weather before each life's store, and counts what it asks for and ends up with.

    Args:
        rounds: of the run.
        replicas: of the run.
        seed: of the weather.
    """

    def __init__(self, rounds: int, replicas: int, seed: int) -> None:
        context = multiprocessing.get_context("fork")
        self.rounds, self._seed = rounds, seed
        self._rank = self._noted = 0
        self._asked: MeteredStore | None = None
        self._sent: MeteredStore | None = None
        self._counted = (0, 0)
        self._struck: Counter[str] = Counter()
        self._weather: FaultyStore | None = None
        #: By rank and round: requests of the product, and those that were sent, retries included.
        self.asked = context.RawArray("q", replicas * rounds)
        self.sent = context.RawArray("q", replicas * rounds)
        #: By rank and number of decisions: a part of the digest of the global parameters.
        self.digests = context.RawArray("Q", replicas * (rounds + 1))
        #: By rank and kind: faults that struck.
        self.faults = context.RawArray("q", replicas * len(KINDS))

    def store(self, inner: ObjectStore, rank: int, attempt: int) -> ObjectStore:
        faults = Faults(**{**asdict(FAULTS), "seed": self._seed})
        self._rank = rank
        # It counts requests by key; what is measured is the product's memory, not the weather's.
        weather._COUNTED = 1 << 12  # type: ignore[misc]
        logging.getLogger("diloco_cloud.store.retry").setLevel(logging.ERROR)
        self._weather = FaultyStore(inner, faults, rank=rank, attempt=attempt)
        self._sent = MeteredStore(self._weather)
        self._asked = MeteredStore(RetryingStore(self._sent, PATIENCE))
        return self._asked

    def on_round(self, report: RoundReport) -> None:
        assert self._asked is not None
        assert self._sent is not None
        totals = (self._asked.usage.requests.total(), self._sent.usage.requests.total())
        if report.round < self.rounds:
            place = self._rank * self.rounds + report.round
            self.asked[place] += totals[0] - self._counted[0]
            self.sent[place] += totals[1] - self._counted[1]
        self._counted = totals
        assert self._weather is not None
        injected = self._weather.injected
        for index, kind in enumerate(KINDS):
            self.faults[self._rank * len(KINDS) + index] += injected[kind] - self._struck[kind]
        self._struck = injected

    def on_step(self, manager: MockManager) -> None:
        decisions = manager.current_round()
        if decisions != self._noted and decisions <= self.rounds:
            self._noted = decisions
            place = self._rank * (self.rounds + 1) + decisions
            self.digests[place] = digest_part(manager.global_digest() or "")

    def struck(self) -> dict[str, int]:
        """By kind, faults that were put in."""
        return {kind: sum(self.faults[i :: len(KINDS)]) for i, kind in enumerate(KINDS)}

    def requests(self, counts: Any, start: int, stop: int) -> float:
        """Requests per replica and round, over some rounds."""
        total = sum(
            sum(counts[rank * self.rounds + start : rank * self.rounds + stop])
            for rank in range(REPLICAS)
        )
        return total / REPLICAS / (stop - start)


def digest_part(digest: str) -> int:
    """As much of a digest as the table has room for; never 0, which stands for none."""
    return int(digest[:16], 16) | 1


@dataclass(frozen=True)
class Sample:
    """The state of the run at some round.

    Attributes:
        objects, nbytes: in the prefix, at most since the sample before; without those that each
            life of a rank leaves for good.
        per_life: those.
        resident_mb, threads, files: of rank 0's process.
    """

    round: int
    seconds: float
    objects: int
    nbytes: int
    per_life: int
    resident_mb: float
    threads: int
    files: int


@dataclass
class Soak(ForkedRun):
    """A long run whose supervisor also kills, and samples what could grow.

    Attributes:
        every: rounds between two samples.
        kills: made so far.
    """

    every: int = 500
    kill_every: int = KILL_EVERY
    seed: int = 0
    kills: int = field(default=0, init=False)
    samples: list[Sample] = field(default_factory=list, init=False)
    _began: float = field(init=False)
    _peak: tuple[int, int] = field(default=(0, 0), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rng = random.Random(self.seed)
        self._next_kill = self.kill_every
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    def tick(self) -> None:
        done = max(self.board.round)
        self._measure()
        if done >= len(self.samples) * self.every and 0 in self.living:
            with contextlib.suppress(OSError, KeyError):  # It may have ended a moment ago.
                self.samples.append(self._sample(done))
                print(self.samples[-1], file=sys.stderr, flush=True)
        if self._next_kill <= done < self.job.rounds - 10:
            victims = [one for rank, one in self.living.items() if rank != 0]
            if victims:
                os.kill(self._rng.choice(victims)[1], signal.SIGKILL)
                self.kills += 1
            self._next_kill = done + self._rng.randrange(1, 2 * self.kill_every)

    def _measure(self) -> None:
        """Note the prefix's size: it grows from one collection of garbage to the next."""
        listed = [info for info in self.prefix.list() if not info.key.startswith(keys.REPLICAS)]
        self._peak = (
            max(self._peak[0], len(listed)),
            max(self._peak[1], sum(info.size for info in listed)),
        )

    def _sample(self, done: int) -> Sample:
        (objects, nbytes), self._peak = self._peak, (0, 0)
        process = Path(f"/proc/{self.living[0][1]}")
        lines = (process / "status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines if ":" in line)
        return Sample(
            round=done,
            seconds=round(self.seconds, 1),
            objects=objects,
            nbytes=nbytes,
            per_life=len(self.prefix.list(keys.REPLICAS)),
            resident_mb=round(int(status["VmRSS"].split()[0]) / 1024, 1),
            threads=int(status["Threads"]),
            files=len(list((process / "fd").iterdir())),
        )


def soak(rounds: int, root: Path, *, seed: int, kill_every: int) -> dict[str, Any]:
    """Run, check what must always hold, and return the figures.

    Raises:
        ViolatedError: a replica drifted, or a token was lost.
        RuntimeError: a replica failed.
    """
    observer = Observer(rounds, REPLICAS, seed)
    run = Soak(
        Job(
            replicas=REPLICAS,
            rounds=rounds,
            sync_every=2,
            snapshot_every=5,
            heartbeat_s=0.2,
            chunk_bytes=4096,
            keep=("/commit",),
        ),
        root,
        observer,
        limit_s=60 + rounds * 0.5,
        every=max(1, rounds // SAMPLES),
        kill_every=kill_every,
        seed=seed,
    )
    run.run(tick_s=0.1)
    seconds = run.seconds
    commits = [one.commit for one in check(run)]
    merged = sum(merged_tokens(commits).values())
    processed = sum(run.board.processed(*life) for life in run.started)
    window = max(1, rounds // 10)

    def requests(counts: Any) -> dict[str, float]:
        return {
            "first": round(observer.requests(counts, 0, window), 2),
            "last": round(observer.requests(counts, rounds - window, rounds), 2),
        }

    return {
        "rounds": len(commits),
        "minutes": round(seconds / 60, 1),
        "rounds_per_s": round(len(commits) / seconds, 1),
        "kills": run.kills,
        "faults": observer.struck(),
        "parameters_compared": _compare(observer, [commit.base for commit in commits]),
        "mismatches": 0,  # or it would have been raised
        "replicas_per_round": round(mean(len(one.contributors) for one in commits), 2),
        "tokens": {"processed": processed, "merged": merged, "died": processed - merged},
        "window": window,
        "requests_per_replica_and_round": requests(observer.asked),
        "with_retries": requests(observer.sent),
        "samples": [asdict(one) for one in run.samples],
    }


def _compare(observer: Observer, bases: Sequence[str]) -> int:
    """How many times a replica's parameters were compared with what the next decision builds on.

    Raises:
        ViolatedError: they were others.
    """
    table, columns = observer.digests, observer.rounds + 1
    compared = 0
    for decisions, base in enumerate(bases[:columns]):
        found = [table[rank * columns + decisions] for rank in range(REPLICAS)]
        known = [one for one in found if one]
        wrong = [one for one in known if base and one != digest_part(base)]
        require(not wrong, f"after {decisions} decisions, {len(wrong)} replicas have drifted")
        compared += len(known)
    return compared


def growth(figures: dict[str, Any]) -> list[str]:
    """What grew that should not; for runs long enough to tell."""
    found: list[str] = []
    asked = figures["requests_per_replica_and_round"]
    if abs(asked["last"] / asked["first"] - 1) > 0.1:
        found.append(f"requests per round went from {asked['first']} to {asked['last']}")
    # Not from the first rounds, in which pools fill.
    samples = [Sample(**one) for one in figures["samples"]][len(figures["samples"]) // 10 :]
    early, late = samples[: len(samples) // 2], samples[len(samples) // 2 :]
    for name, of, slack in (
        ("objects in the prefix", lambda one: one.objects, 1.1),
        ("bytes in the prefix", lambda one: one.nbytes, 1.1),
        ("threads", lambda one: one.threads, 1.5),
        ("open files", lambda one: one.files, 1.1),
    ):
        before, after = median(map(of, early)), median(map(of, late))
        if after > slack * before:
            found.append(f"{name}: {before} in the first half, {after} in the second")
    # The allocator's own arenas, and caches of a fixed size, take some thousand rounds to fill.
    if late[-1].resident_mb > 1.01 * late[0].resident_mb:
        found.append(f"memory: {late[0].resident_mb} MB half-way, {late[-1].resident_mb} MB then")
    return found


def report(figures: dict[str, Any]) -> str:
    """The page of results."""
    samples = [Sample(**one) for one in figures["samples"]]
    lines = [
        f"- {name.replace('_', ' ')}: {value}"
        for name, value in figures.items()
        if name not in ("samples", "window")
    ]
    head = "| " + " | ".join(vars(samples[0])) + " |"
    rows = ["| " + " | ".join(str(value) for value in vars(one).values()) + " |" for one in samples]
    rule = "|---" * len(vars(samples[0])) + "|"
    return "\n".join(["# Soak", "", *lines, "", head.replace("_", " "), rule, *rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the weather and the kills")
    parser.add_argument("--kill-every", type=int, default=KILL_EVERY, help="rounds, on average")
    parser.add_argument("--dir", type=Path, help="where the run is kept while it lasts")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="soak-", dir=options.dir))
    try:
        figures = soak(options.rounds, root, seed=options.seed, kill_every=options.kill_every)
    except ViolatedError as error:
        sys.exit(f"{error}\n(kept in {root})")
    shutil.rmtree(root)
    figures = {
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": " ".join(["python", *sys.argv]),
        "grew": growth(figures) if options.rounds >= LONG else [],
        **figures,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "soak.json").write_text(json.dumps(figures, indent=1))
    (options.out / "soak.md").write_text(report(figures))
    print(report(figures))
    sys.exit(bool(figures["grew"]))


if __name__ == "__main__":
    main()
