"""One cell of the measurement: N replicas, S bytes, one store, all contenders."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass

from exchange_contenders import Contender, is_supported, limit, ours, reference
from exchange_fleet import run_rounds, threads_for
from exchange_replica import Job
from exchange_results import Result, SlowMean, result
from exchange_stores import Place
from exchange_tensors import model_shape
from process_meters import available_memory

logger = logging.getLogger(__name__)

MIB = 2**20
#: Of a replica without its tensors.
_PROCESS_BYTES = 200 * MIB
#: Bytes that are given back before anything else is measured.
_WORTH_RECLAIMING = 64 * MIB
#: Rounds that lie in the store at once, and models in each replica: pickles take five.
_ROUNDS_AND_MODELS = {"ours": (2, 2), "limit": (2, 2), "reference": (1, 5)}


@dataclass(frozen=True)
class Cell:
    """N replicas that average S bytes."""

    replicas: int
    nbytes: int

    @staticmethod
    def parse(text: str) -> Cell:
        """``8x256``: eight replicas, 256 MiB."""
        replicas, _, mib = text.partition("x")
        return Cell(int(replicas), int(mib) * MIB)

    def __str__(self) -> str:
        return f"{self.replicas}x{self.nbytes // MIB}"

    def memory(self, contender: Contender) -> int:
        """Bytes that a measurement takes at most, in the store and in replicas."""
        rounds, models = _ROUNDS_AND_MODELS[contender.kind]
        store = rounds * (self.replicas + 1) * self.nbytes
        return store + self.replicas * (models * self.nbytes + _PROCESS_BYTES)


@dataclass(frozen=True)
class Scope:
    """What is measured in each cell.

    Attributes:
        modes: reductions of fp32.
        codecs: beside fp32, each with the reduction that "auto" chooses.
        reducers: numbers of volunteers.
        references: by name.
        rounds, reference_rounds: that are measured.
        layers: of the model.
    """

    modes: tuple[str, ...]
    codecs: tuple[str, ...]
    reducers: tuple[int, ...]
    references: tuple[str, ...]
    rounds: int
    reference_rounds: int
    layers: int

    @property
    def ours(self) -> Iterator[Contender]:
        """Our contenders, as far as the package has them."""
        wanted = [ours(mode, "fp32") for mode in self.modes]
        wanted += [ours("sharded", "fp32", count) for count in self.reducers]
        wanted += [ours("auto", codec) for codec in self.codecs]
        for contender in wanted:
            if is_supported(contender):
                yield contender
            else:
                logger.warning("%s: not in this version of the package", contender.name)


@dataclass
class CellMeasurement:
    """Measures one cell in one place."""

    cell: Cell
    place: Place
    scope: Scope
    means: SlowMean

    def results(self) -> Iterator[Result]:
        """Ours, each after the limit it is compared with, then the references."""
        limits: dict[tuple[int, int], Result] = {}
        for contender in filter(self._fits, self.scope.ours):
            found = self._run(contender, self.scope.rounds)
            bound = limit(contender, self.cell.nbytes, self.cell.replicas, found)
            moves = (bound.up, bound.down)
            if moves not in limits:
                limits[moves] = self._run(bound, self.scope.rounds)
                yield limits[moves]
            found.limit, found.limit_s = bound.name, limits[moves].seconds
            yield found
        for contender in filter(self._fits, map(reference, self.scope.references)):
            yield self._run(contender, self.scope.reference_rounds)

    def _fits(self, contender: Contender) -> bool:
        needed, there = self.cell.memory(contender), available_memory()
        if needed > there:
            what = f"{self.cell} {contender.name}"
            logger.warning("%s needs %d MiB of %d: left out", what, needed // MIB, there // MIB)
        return needed <= there

    def _run(self, contender: Contender, rounds: int) -> Result:
        cell, place = self.cell, self.place
        path = re.sub("[^a-z0-9]+", "-", f"{cell} {contender.kind} {contender.name}".lower())
        sizes = tuple(model_shape(cell.nbytes, self.scope.layers))
        uri, threads = f"{place.uri}/{path}", threads_for(cell.replicas)
        job = Job(contender, uri, place.environments, place.near, sizes, rounds, threads)

        def between(_round: int) -> None:
            if contender.kind != "ours":  # which deletes its rounds itself
                place.clear(f"{path}/up" if contender.kind == "limit" else path)
            if available_memory() < cell.memory(contender):
                place.reclaim()

        try:
            return result(job, place, run_rounds(job, place, between), self.means)
        finally:
            if place.clear(path) >= _WORTH_RECLAIMING:
                place.reclaim()
