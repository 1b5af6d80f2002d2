"""With inner checkpoints a killed run ends as if it had never been killed, to the bit."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
from fleet import Death, Fleet, Life
from replicas import Job

# A life that its store has killed may have threads that find out only now.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

JOBS = {
    "plain": Job(sync_every=3, steps=18),
    "sharded": Job(world_size=3, sync_every=3, steps=15, reduction="sharded"),
    "alpha": Job(sync_every=3, steps=18, alpha=0.5),
    "delay": Job(sync_every=4, steps=24, delay=2),
    "fragments": Job(sync_every=6, steps=20, fragments=3),
    "streaming": Job(sync_every=9, steps=26, fragments=3, delay=1, alpha=0.25),
}


def fleet(job: Job, *, on: bool = True, **settings: Any) -> Fleet:
    """A run in which every round waits for everybody."""
    manager = {"checkpoint_inner": on}
    return Fleet(job, quorum=job.world_size, manager=manager, restart_s=0.01, **settings)


def digest_of(run: Fleet, deaths: Mapping[Life, Death] | None = None) -> str:
    ends = run.run(deaths)
    (digest,) = {end.digest for end in ends.values()}
    return digest


def everybody_dies(rng: random.Random, requests: Mapping[Life, int]) -> dict[Life, Death]:
    """Each rank's first two lives end at a request of their own."""
    return {
        (rank, attempt): Death(rng.randint(1, requests[rank, 0]), after=rng.random() < 0.5)
        for rank, _ in requests
        for attempt in range(2)
    }


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("seed", range(4))
def test_a_killed_run_ends_as_an_undisturbed_one(name: str, seed: int) -> None:
    undisturbed = fleet(JOBS[name])
    expected = digest_of(undisturbed)
    rng = random.Random(seed)
    for _ in range(3):
        deaths = everybody_dies(rng, undisturbed.requests)
        killed = fleet(JOBS[name])
        assert digest_of(killed, deaths) == expected, deaths
        assert {c.round: c.contributors for c in killed.history()}.keys() == {
            c.round: c.contributors for c in undisturbed.history()
        }.keys()


@pytest.mark.parametrize("name", ["plain", "streaming"])
def test_what_a_codec_left_unsent_is_not_lost_with_its_process(name: str) -> None:
    undisturbed = fleet(JOBS[name], codec="sparse")
    expected = digest_of(undisturbed)
    rng = random.Random(name)
    for _ in range(2):
        deaths = everybody_dies(rng, undisturbed.requests)
        assert digest_of(fleet(JOBS[name], codec="sparse"), deaths) == expected, deaths


def test_checkpoints_change_nothing_in_an_undisturbed_run() -> None:
    job = JOBS["streaming"]
    assert digest_of(fleet(job)) == digest_of(fleet(job, on=False))


def test_without_checkpoints_a_killed_run_ends_differently() -> None:
    expected = digest_of(fleet(JOBS["plain"]))
    deaths = {(rank, 0): Death(method="create", key="00000002.0/put") for rank in range(2)}
    assert digest_of(fleet(JOBS["plain"]), deaths) == expected
    assert digest_of(fleet(JOBS["plain"], on=False), deaths) != expected
