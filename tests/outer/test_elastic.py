"""Runs whose membership changes from round to round; tests/outer/fleet.py checks what must hold."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from fleet import TOKENS, Death, Fleet
from replicas import Job

from diloco_cloud import keys
from diloco_cloud.errors import AlreadyExistsError
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.outer import MockManager
from diloco_cloud.store.memory import MemoryStore

# A life that its store has killed may have threads that find out only now.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

FOUR = Job(world_size=4, sync_every=10, steps=80)
PACE = dict.fromkeys(range(8), 0.005)


def breadth(fleet: Fleet) -> list[int]:
    """Contributors of each round."""
    return [len(commit.contributors) for commit in fleet.history()]


def test_everybody_is_in_every_round_when_nothing_happens() -> None:
    fleet = Fleet(FOUR, pace_s=PACE, grace_s=5.0)
    ends = fleet.run()
    assert breadth(fleet) == [4] * 8
    assert len({end.digest for end in ends.values()}) == 1


def test_a_slow_replica_is_in_every_round_with_the_steps_it_has_done() -> None:
    # Given rather than learnt, so that the test does not depend on how busy the machine is.
    job = Job(world_size=4, sync_every=40, steps=240)
    fleet = Fleet(job, pace_s={**dict.fromkeys(range(3), 0.015), 3: 0.12}, grace_s=1.5)
    fleet.run()
    late = [commit.contributors for commit in fleet.history()[1:]]
    assert all(len(contributors) == 4 for contributors in late)
    steps = [contributors[3].inner_steps for contributors in late]
    assert all(1 <= step < 30 for step in steps)
    assert all(contributors[0].inner_steps == 40 for contributors in late)
    assert late[0][3].weight < late[0][0].weight / 1.3


def test_a_strict_quorum_waits_for_the_slow_one() -> None:
    fleet = Fleet(FOUR, pace_s={**PACE, 3: 0.02}, quorum=4)
    fleet.run()
    assert {one.inner_steps for commit in fleet.history() for one in commit.contributors} == {10}


def test_a_stopped_replica_misses_rounds_and_loses_nothing() -> None:
    def stop(rank: int, attempt: int, step: int, manager: MockManager) -> None:
        if (rank, step) == (1, 14):
            time.sleep(0.5)

    fleet = Fleet(Job(world_size=4, sync_every=10, steps=160), pace_s=PACE, on_step=stop)
    ends = fleet.run()
    assert ends[1].attempt == 0
    missed = [c for c in fleet.history() if 1 not in [one.rank for one in c.contributors]]
    assert missed
    back = fleet.history()[missed[-1].round + 1]
    (carried,) = [one for one in back.contributors if one.rank == 1]
    assert carried.tokens > 0
    # Work that is late weighs less than its tokens.
    others = [one for one in back.contributors if one.rank != 1]
    assert carried.weight < carried.tokens
    assert all(one.weight == one.tokens for one in others)
    assert fleet.history()[-1].ledger[1].merged == fleet.processed[1, 0]


def test_the_last_survivor_goes_on_alone_and_the_dead_come_back() -> None:
    fleet = Fleet(
        Job(world_size=4, sync_every=10, steps=300),
        pace_s=PACE,
        restart_when=lambda: 1 in breadth(fleet),
    )
    death = Death(method="create", key="rounds/00000004.0/put/")
    fleet.run({(rank, 0): death for rank in range(3)})
    sizes = breadth(fleet)
    assert min(sizes) == 1
    assert sizes[-1] == 4


def test_rounds_stop_below_a_strict_quorum_until_the_dead_are_back() -> None:
    fleet = Fleet(FOUR, pace_s=PACE, restart_s=0.3, quorum=4)
    fleet.run({(rank, 0): Death(call=25 + rank) for rank in range(3)})
    assert breadth(fleet) == [4] * 8


def test_a_handed_over_round_is_merged_and_nobody_waits() -> None:
    def leave(rank: int, attempt: int, step: int, manager: MockManager) -> None:
        if (rank, attempt, step) == (2, 0, 23):
            manager.request_hand_over()

    fleet = Fleet(FOUR, pace_s=PACE, on_step=leave, restart_s=0.1)
    ends = fleet.run()
    assert ends[2].attempt == 1
    assert fleet.processed[2, 0] == 24 * TOKENS
    merged = [
        one.tokens
        for commit in fleet.history()
        for one in commit.contributors
        if (one.rank, one.attempt) == (2, 0)
    ]
    assert sum(merged) == fleet.processed[2, 0]


@pytest.mark.parametrize("delay", [0, 2])
def test_a_hand_over_while_waiting_for_a_round_ends_at_once(delay: int) -> None:
    """The others are slow; the one that is told to go waits for them, its work in the store."""
    told = threading.Event()

    def leave(rank: int, attempt: int, step: int, manager: MockManager) -> None:
        if (rank, attempt, step) == (0, 0, 9):
            threading.Timer(0.2, lambda: (manager.request_hand_over(), told.set())).start()
        elif rank == 1 and step == 8:
            assert told.wait(10)

    job = Job(world_size=2, sync_every=10, steps=40, delay=delay)
    fleet = Fleet(job, pace_s=PACE, on_step=leave, quorum=2)
    ends = fleet.run()
    assert ends[0].attempt == 1
    assert [one.attempt for one in fleet.history()[0].contributors] == [0, 0]


def test_a_replica_that_drifts_is_left_out_and_fetches_the_agreed_state() -> None:
    def flip(rank: int, attempt: int, step: int, manager: MockManager) -> None:
        if (rank, step) == (1, 25):
            with torch.no_grad():
                manager.fragments[0].parameters[0].view(-1)[0].add_(1.0)

    fleet = Fleet(FOUR, pace_s=PACE, on_step=flip, grace_s=2.0)
    ends = fleet.run()
    assert ends[1].attempt == 0  # without a restart
    (left_out,) = [one for commit in fleet.history() for one in commit.excluded]
    assert left_out.rank == 1
    assert "other global parameters" in left_out.reason
    assert fleet.history()[-1].ledger[1].discarded == 10 * TOKENS


def test_an_outlier_is_left_out() -> None:
    def explode(rank: int, attempt: int, step: int, manager: MockManager) -> None:
        if (rank, step) == (1, 19):
            fleet.blow_up(manager)

    class Exploding(Fleet):
        def blow_up(self, manager: MockManager) -> None:
            with torch.no_grad():
                next(iter(manager.loop._fragments[0]._model_fragment.parameters())).add_(1e4)  # type: ignore[union-attr]

    fleet = Exploding(FOUR, pace_s=PACE, on_step=explode, grace_s=2.0, outlier_norm=10.0)
    fleet.run()
    (left_out,) = [one for commit in fleet.history() for one in commit.excluded]
    assert left_out.rank == 1
    assert "outlier" in left_out.reason


def test_a_life_that_was_declared_dead_cannot_come_back() -> None:
    """Attempt 1 takes over while attempt 0 sleeps; attempt 0 then finds that it is not needed."""
    awake = threading.Event()

    def sleep(rank: int, attempt: int, step: int, manager: MockManager) -> None:
        if (rank, attempt, step) == (1, 0, 15):
            assert awake.wait(20)
        if (rank, attempt, step) == (0, 0, 60):
            awake.set()

    job = Job(world_size=2, sync_every=10, steps=80)
    fleet = Fleet(job, pace_s=PACE, on_step=sleep)
    fleet.second_lives = {1: 0.3}
    fleet.run()
    assert "taken over" in str(fleet.superseded[1])
    for commit in fleet.history():
        assert len({one.rank for one in commit.contributors}) == len(commit.contributors)


def test_half_of_the_contributions_can_be_lost() -> None:
    """A PUT that never arrives is a round missed: the work is carried to a later one."""
    rng = random.Random(0)

    class Lossy(MemoryStore):
        def create(self, key: str, data: object) -> None:
            if "/put/" in key and rng.random() < 0.5:
                # Arrives when nobody looks any more: after the decision.
                time.sleep(0.15)
            super().create(key, data)  # type: ignore[arg-type]

    fleet = Fleet(Job(world_size=4, sync_every=10, steps=120), pace_s=PACE, grace_s=0.02)
    fleet.store = Lossy
    fleet.run()
    assert 1 <= min(breadth(fleet)) < 4
    for entry in fleet.history()[-1].ledger:
        assert entry.merged == entry.processed


def test_growing_and_shrinking_in_mid_run() -> None:
    """Ranks 4 to 7 come when the run has begun; four then go for good."""

    def go(rank: int, attempt: int, step: int, manager: MockManager) -> None:
        if rank >= 4 and manager.current_round() >= 9:
            manager.request_hand_over()

    job = Job(world_size=8, sync_every=10, steps=160)
    fleet = Fleet(job, pace_s=PACE, on_step=go, start_s=dict.fromkeys(range(4, 8), 0.4))
    fleet.launched_with, fleet.retired = 4, {4, 5, 6, 7}
    fleet.run()
    sizes = breadth(fleet)
    assert (sizes[0], max(sizes), sizes[-1]) == (4, 8, 4)


def test_another_replica_defines_the_start_where_replica_0_never_comes() -> None:
    fleet = Fleet(FOUR, pace_s=PACE, join_timeout_s=0.3, start_s={0: 1.0})
    fleet.run()
    # Several may come to it at once; the manifest then names one.
    starts = {key for key in fleet.stored if key.startswith("state/00000000/0.")}
    assert starts
    assert not any(key.startswith("state/00000000/0.0000") for key in starts)
    assert breadth(fleet)[-1] == 4


def test_the_words_of_a_round_are_small() -> None:
    fleet = Fleet(FOUR, pace_s=PACE, snapshot_every=100)
    fleet.run()
    store = MemoryStore(fleet.name)
    for info in store.list(keys.ROUNDS):
        if "/put/" not in info.key:
            assert info.size < 4096
    assert Commit.decode(store.get(keys.commit(0, 0))).contributors


def test_a_torn_contribution_is_left_out_and_its_work_comes_again() -> None:
    """A store that shows half of a cut-off upload, and refuses to create it again."""

    class Torn(MemoryStore):
        def create(self, key: str, data: object) -> None:
            if "/put/0002." in key and "/00000003." in key:
                super().create(key, b"".join(map(bytes, data))[:-40])  # type: ignore[call-overload]
                raise AlreadyExistsError(key)
            super().create(key, data)  # type: ignore[arg-type]

    fleet = Fleet(FOUR, pace_s=PACE, store=Torn, grace_s=2.0)
    fleet.run()
    (left_out,) = [one for commit in fleet.history() for one in commit.excluded]
    assert (left_out.rank, left_out.kept) == (2, True)
    assert "truncated" in left_out.reason
    assert fleet.history()[-1].ledger[2].merged == fleet.processed[2, 0]
