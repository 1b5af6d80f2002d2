"""Who a round waits for, and for how long: pure rules over one listing."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from diloco_cloud import keys
from diloco_cloud.exchange.history import History, Standing
from diloco_cloud.exchange.membership import Attendance, Lateness, Life, Membership
from diloco_cloud.store.base import ObjectInfo

ROUND = 7


def history(*ranks: int, attempt: int = 0, finished: tuple[int, ...] = ()) -> History:
    """``ranks`` were in the last round."""
    return History(
        round=ROUND,
        finished=finished,
        standings={
            r: Standing(rank=r, attempt=attempt, round=ROUND - 1, position=0) for r in ranks
        },
    )


EVERYBODY = history(*range(4))


def seen(
    *put: int,
    join: tuple[int, ...] = (),
    leave: tuple[int, ...] = (),
    away: tuple[int, ...] = (),
    attempts: Mapping[int, int] | None = None,
    at: Mapping[int, float] | None = None,
) -> Attendance:
    """A listing of the open round."""
    kinds = {keys.put: put, keys.join: join, keys.leave: leave, keys.away: away}
    listed = [
        ObjectInfo(key(ROUND, 0, rank, (attempts or {}).get(rank, 0)), 1, (at or {}).get(rank, 0.0))
        for key, ranks in kinds.items()
        for rank in ranks
    ]
    return Attendance.of(listed, ROUND, 0)


def expected(
    rules: Membership,
    there: Attendance,
    past: History,
    lives: Mapping[int, Life] | None = None,
    *,
    cold: bool = False,
) -> set[int]:
    return rules.expected(there, past, lives or {}, cold=cold)


def test_a_strict_round_waits_for_every_rank_but_those_that_left() -> None:
    rules = Membership(4)
    assert expected(rules, seen(0, leave=(3,)), history(finished=(2,))) == {0, 1}


def test_a_round_waits_for_the_members_of_the_last_one() -> None:
    rules = Membership(4, quorum=None)
    assert expected(rules, seen(0), history(0, 1, 2)) == {0, 1, 2}


def test_a_replica_that_has_come_up_is_waited_for() -> None:
    rules = Membership(4, quorum=None)
    assert expected(rules, seen(0, join=(3, 9)), history(0, 1)) == {0, 1, 3, 9}


@pytest.mark.parametrize("cold", [True, False])
def test_one_that_came_up_and_died_is_not_waited_for(cold: bool) -> None:
    rules = Membership(2, quorum=None)
    assert expected(rules, seen(0, join=(1,)), history(0), {1: "gone"}, cold=cold) == {0}


def test_nobody_waits_for_one_that_said_it_goes_or_whose_heart_stopped() -> None:
    rules = Membership(4, quorum=None)
    there = seen(0, away=(1,))
    assert expected(rules, there, history(0, 1, 2, 3), {2: "gone", 3: "alive"}) == {0, 3}


def test_what_is_handed_over_counts_although_its_replica_is_gone() -> None:
    there = seen(0, 1, away=(1,))
    assert there.away == frozenset()
    assert set(there.arrived) == {0, 1}


def test_a_restarting_replica_is_not_waited_for_while_others_train() -> None:
    rules = Membership(3, quorum=None)
    assert expected(rules, seen(0), history(0, 1, 2), {1: "starting", 2: "alive"}) == {0, 2}


def test_when_all_begin_again_those_that_start_are_waited_for() -> None:
    rules, past = Membership(3, quorum=None), history(0, 1, attempt=0)
    there = seen(0, attempts={0: 1})
    assert rules.is_cold(there, past)
    lives: dict[int, Life] = {1: "starting", 4: "starting", 2: "gone"}
    assert expected(rules, there, past, lives, cold=True) == {0, 1, 4}


def test_one_member_of_the_last_round_makes_it_no_beginning() -> None:
    rules = Membership(3, quorum=None)
    assert not rules.is_cold(seen(0, 1, attempts={0: 1}), history(0, 1))


@pytest.mark.parametrize(
    ("quorum", "there", "needed"),
    [("all", 4, 4), (None, 1, 1), (None, 2, 1), (None, 3, 2), (None, 8, 4), (3, 8, 3)],
)
def test_quorum_is_half_of_those_there_unless_said_otherwise(
    quorum: int | None, there: int, needed: int
) -> None:
    rules, past = Membership(8, quorum=quorum), history(*range(there))
    waiting = set(range(there))
    assert rules.needed(seen(0), waiting, past) == needed


def test_a_fixed_quorum_shrinks_with_the_replicas_that_have_finished() -> None:
    rules = Membership(4, quorum=3)
    assert rules.needed(seen(0, leave=(1,)), {0}, history(0, finished=(2,))) == 2


def test_the_newest_life_of_a_rank_is_the_one_that_counts() -> None:
    infos = [
        ObjectInfo(keys.away(ROUND, 0, 1, 0), 0, 0.0),
        ObjectInfo(keys.join(ROUND, 0, 1, 1), 0, 0.0),
        ObjectInfo(keys.put(ROUND, 0, 2, 3), 9, 0.0),
        ObjectInfo(keys.put(ROUND, 0, 2, 1), 9, 0.0),
        ObjectInfo(keys.directory(ROUND, 0) + "put/junk", 9, 0.0),
    ]
    there = Attendance.of(infos, ROUND, 0)
    assert (there.joined, there.away) == ({1}, frozenset())
    assert there.arrived[2].attempt == 3
    assert there.newest == {1: 1, 2: 3}


def test_grace_is_learnt_from_how_late_a_replica_usually_is() -> None:
    rules, past = Membership(3, quorum=None), history(0, 1, 2)
    for _ in range(30):
        rules.learn(seen(0, 1, 2, at={0: 10.0, 1: 10.0, 2: 13.0}), EVERYBODY, 2, 100.0)
    assert rules.grace({2}, pace_s=100.0) == pytest.approx(3.0 + rules.free_s, rel=0.1)
    assert rules.grace({1}, pace_s=100.0) == pytest.approx(rules.free_s, abs=0.5)
    assert rules.needed(seen(0), {0, 1, 2}, past) == 2


def test_nobody_is_waited_for_longer_than_half_a_round() -> None:
    rules = Membership(3, quorum=None)
    rules.learn(seen(0, 1, 2, at={2: 900.0}), EVERYBODY, 2, 100.0)
    assert rules.grace({2}, pace_s=100.0) <= 50.0 + rules.free_s


def test_a_given_grace_is_kept_exactly() -> None:
    rules = Membership(3, quorum=None, grace_s=7.0)
    rules.learn(seen(0, 1, 2, at={2: 900.0}), EVERYBODY, 2, 100.0)
    assert rules.grace({2}, pace_s=100.0) == 7.0


def test_one_that_missed_a_round_gets_more_time() -> None:
    rules = Membership(3, quorum=None)
    for _ in range(20):
        rules.learn(seen(0, 1, 2, at={2: 1.0}), EVERYBODY, 2, 100.0)
    before = rules.grace({2}, pace_s=100.0)
    rules.learn(seen(0, 1), EVERYBODY, 2, 100.0)
    assert rules.grace({2}, pace_s=100.0) > before


def test_lateness_follows_the_retransmission_timer() -> None:
    """RFC 6298, section 2, by hand: SRTT 4, RTTVAR 2; then a sample of 8."""
    late = Lateness.first(4.0)
    assert late.allowance == 4.0 + 4 * 2.0
    late.add(8.0)
    assert late.deviation == 0.75 * 2.0 + 0.25 * 4.0
    assert late.mean == 0.875 * 4.0 + 0.125 * 8.0


def test_a_slow_replica_contributes_early_once_a_quorum_is_in() -> None:
    rules, past = Membership(4, quorum=None), history(0, 1, 2, 3)
    rules.learn(seen(0, 1, 2, 3), EVERYBODY, 2, 10.0)
    assert not rules.closes(seen(0), past, remaining_s=30.0)
    assert rules.closes(seen(0, 1), past, remaining_s=30.0)
    assert not rules.closes(seen(0, 1), past, remaining_s=0.5)


def test_a_strict_replica_never_contributes_early() -> None:
    assert not Membership(2).closes(seen(0, 1), history(0, 1), remaining_s=99.0)


def test_a_decided_round_is_not_trained_for() -> None:
    listed = [ObjectInfo(keys.commit(ROUND, 0), 1, 0.0)]
    there = Attendance.of(listed, ROUND, 0)
    assert Membership(2, quorum=None).closes(there, history(0, 1), remaining_s=0.0)


def test_a_missing_quorum_is_waited_for_three_rounds() -> None:
    rules = Membership(4, quorum=None, heartbeat_s=0.1)
    assert rules.deadline_s(10.0, 1800.0) == pytest.approx(3 * 10.0 + rules.free_s)
    rules.learn(seen(0, 1), EVERYBODY, 2, 20.0)
    assert rules.deadline_s(10.0, 1800.0) == pytest.approx(3 * 20.0 + rules.free_s)
    assert rules.deadline_s(10.0, 30.0) == 30.0


def test_slack_of_an_overlapped_exchange_is_free() -> None:
    rules = Membership(4, quorum=None, overlap_s=9.0)
    for _ in range(20):
        rules.learn(seen(0, 1), EVERYBODY, 2, 20.0, exchange_s=4.0)
    assert rules.free_s == pytest.approx(5.0, rel=1e-3)
    rules.overlap_s = 3.0
    assert rules.slack_s == 0.0
