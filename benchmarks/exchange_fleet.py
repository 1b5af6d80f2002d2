"""Replicas in processes of their own, started together for each round, and what they cost."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from exchange_replica import Job, Measure, Outcome, Ready, replica
from exchange_stores import Place
from exchange_volunteer import volunteer
from process_meters import cpu_s, machine_cpu_s


@dataclass(frozen=True)
class Round:
    """One round of all replicas.

    Attributes:
        seconds: from the moment when all began to the last one's end.
        replica_cpu_s: of all replicas, and volunteers.
        server_cpu_s: of the store's process.
        links_cpu_s: of the process that carries the lines.
        busy: part of the machine's CPU time that anybody used.
        measures, outcomes: by rank.
    """

    seconds: float
    replica_cpu_s: float
    server_cpu_s: float
    links_cpu_s: float
    busy: float
    measures: tuple[Measure, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def agree(self) -> bool:
        """Whether all replicas ended with the same bytes."""
        return len({outcome.digest for outcome in self.outcomes}) == 1


T = TypeVar("T")

#: From the word to the moment at which all begin at once.
_HEAD_START_S = 0.02
#: A replica that takes longer to get ready, or for a round, is given up.
LONGEST_ROUND_S = 1800.0
#: How long the others' words are waited for when a replica has died.
_LAST_WORDS_S = 5.0


class FleetError(Exception):
    """A replica failed; the message is its traceback, if it left one."""


def run_rounds(job: Job, place: Place, between: Callable[[int], None]) -> list[Round]:
    """Run a job's rounds.

    Args:
        job: what the replicas do.
        place: where.
        between: called before each round, with its number, when no replica is exchanging.

    Raises:
        FleetError: a replica failed.
    """
    replicas, pipes = _start(replica, job, job.replicas)
    volunteers, lines = _start(volunteer, job, job.contender.reducers)
    pids = [process.pid for process in volunteers]
    try:
        return [_round(pipes, place, pids, partial(between, r)) for r in range(1, job.rounds + 1)]
    except BaseException:
        for process in replicas:
            process.kill()
        raise
    finally:
        for process in volunteers:
            process.kill()
        for process in (*replicas, *volunteers):
            process.join()
        for line in lines:
            line.close()


def _start(
    program: Callable[[Job, int, Connection], None], job: Job, count: int
) -> tuple[list[Any], list[Connection]]:
    """So many processes, and the ways to them."""
    context = _forkserver()
    processes, pipes = [], []
    for index in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=program, args=(job, index, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    return processes, pipes


@cache
def _forkserver() -> Any:
    """Makes processes that have torch imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["exchange_replica"])
    # Before Python 3.13 the server does not look where this process does, and says nothing.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before]))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def _round(
    pipes: Sequence[Connection],
    place: Place,
    volunteers: Sequence[int],
    between: Callable[[], None],
) -> Round:
    _collect(pipes, Ready)
    between()
    before = _counters(place, volunteers)
    begins = time.monotonic() + _HEAD_START_S
    _tell(pipes, begins)
    measures = _collect(pipes, Measure)
    server, links, reducers, busy, total = (
        now - then for now, then in zip(_counters(place, volunteers), before, strict=True)
    )
    _tell(pipes, None)
    return Round(
        max(measure.ended for measure in measures) - begins,
        sum(measure.cpu_s for measure in measures) + reducers,
        server,
        links,
        busy / max(total, 1e-9),
        measures,
        _collect(pipes, Outcome),
    )


def _tell(pipes: Sequence[Connection], message: float | None) -> None:
    for pipe in pipes:
        with suppress(ConnectionError):  # of a dead one, which is found next
            pipe.send(message)


def _counters(place: Place, volunteers: Sequence[int]) -> tuple[float, ...]:
    """CPU seconds of the server, the links, the volunteers; of the machine, busy and in all."""
    reducers = sum(map(cpu_s, volunteers))
    return cpu_s(place.server_pid), cpu_s(place.links_pid), reducers, *machine_cpu_s()


def _collect(pipes: Sequence[Connection], kind: type[T]) -> tuple[T, ...]:
    """One message of a kind from each replica."""
    found: dict[int, T] = {}
    dead: set[int] = set()
    while left := {pipe: r for r, pipe in enumerate(pipes) if r not in found and r not in dead}:
        # The others wait for a dead one; but perhaps one of them says what is wrong.
        ready = wait(list(left), timeout=_LAST_WORDS_S if dead else LONGEST_ROUND_S)
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                message = pipe.recv()
            except (EOFError, ConnectionError):
                dead.add(left[pipe])
                continue
            if not isinstance(message, kind):
                raise FleetError(message)
            found[left[pipe]] = message
    if len(found) < len(pipes):
        raise FleetError(f"replicas {sorted(dead)} died; {sorted(left.values())} did not end")
    return tuple(found[rank] for rank in range(len(pipes)))


def threads_for(replicas: int) -> int:
    """Of torch, in each replica: together no more than cores, where that is possible."""
    return max(1, len(os.sched_getaffinity(0)) // replicas)
