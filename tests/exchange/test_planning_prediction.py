"""Predictions against the formulas of the literature, and against common sense."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_cloud.exchange.links import UNKNOWN, Link
from diloco_cloud.exchange.pipelines import carry
from diloco_cloud.exchange.prediction import (
    AGREEMENT_TRIPS,
    Cost,
    Job,
    Plan,
    possible,
    predict,
    slowest,
    streams,
)
from diloco_cloud.store.prices import GB, LISTED

MB = 2**20
#: Codecs that cost no time, where only the network is of interest.
FREE = {"encode_rate": 1e15, "decode_rate": 1e15}
NEAR_LINKS = (Link.of(10e9, 10e9, 0.001),) * 8


def job(nbytes: float, contributors: int, **settings: Any) -> Job:
    return Job(nbytes=round(nbytes), contributors=contributors, **(FREE | settings))


def seconds(kind: Any, a_job: Job, link: Link, *, chunk: int = 4 * MB, parallel: int = 8) -> float:
    return predict(Plan(kind, chunk, parallel), a_job, [link]).seconds


# -- the worked example: S = 1 GB, N = 8, B = 100 MB/s, L = 0.08 s --------------------------------

EXAMPLE = Link.of(100e6, 100e6, 0.08)


@pytest.mark.parametrize(("compression", "table"), [(1, 80.0), (73, 1.2), (108, 0.8)])
def test_all_gather_takes_what_templars_formula_says(compression: float, table: float) -> None:
    s, n, b, latency, parallel = 1e9, 8, 100e6, 0.08, 8
    plan = Plan("all-gather", 16 * MB, parallel)
    cost = predict(plan, job(s, n, put_ratio=compression), [EXAMPLE])
    formula = s / (compression * b) * n + latency * (1 + -(-(n - 1) // parallel))
    if compression > 1:
        assert cost.seconds - cost.agreement_s == pytest.approx(formula, rel=0.01)
        assert cost.seconds - cost.agreement_s == pytest.approx(table, rel=0.16)  # has two digits
    else:  # What is much is read while it is on its way.
        assert cost.seconds == pytest.approx(formula * (n - 1) / n, rel=0.03)


def test_sharded_lies_between_the_limit_and_pipelined_scatter_reduce() -> None:
    # FuncPipe's 2S/B + (N+2)L reads one's own shard back, and waits for each peer in turn.
    s, n, b = 1e9, 8, 100e6
    limit, funcpipe = 2 * s * (n - 1) / n / b, 2 * s / b + (n + 2) * 0.08
    ours = seconds("sharded", job(s, n), EXAMPLE)
    assert limit < ours < funcpipe == pytest.approx(20.8)
    assert ours == pytest.approx(limit, rel=0.10)


def test_sharded_four_bit_is_within_its_row_of_the_table() -> None:
    # Small objects need more under way, or larger chunks, to hide the latency.
    ours = seconds("sharded", job(1e9, 8, put_ratio=4, sum_ratio=4), EXAMPLE, parallel=16)
    assert 2e9 * 7 / 8 / 4 / 100e6 < ours < 5.8


def test_reducers_leave_one_payload_each_way() -> None:
    near = job(1e9, 8, reducers=NEAR_LINKS)
    assert seconds("reducers", near, EXAMPLE) == pytest.approx(10.0, rel=0.12)


# -- limits --------------------------------------------------------------------------------------

FAR_BUT_WIDE = Link.of(100e6, 100e6, 0.0)


@pytest.mark.parametrize("n", [2, 3, 4, 8, 32, 256])
def test_large_payloads_take_their_bytes_over_the_link(n: int) -> None:
    s = 100e9
    a_job = job(s, n, reducers=(Link.of(90e9, 90e9, 0.0),) * 8)
    up, down = s * (1 + 1 / n), 2 * s * (n - 1) / n
    near = {"chunk": 4 * MB, "parallel": 4}
    assert seconds("all-gather", a_job, FAR_BUT_WIDE, **near) == pytest.approx(
        (n - 1) * s / 100e6, rel=0.01
    )
    assert seconds("sharded", a_job, FAR_BUT_WIDE, **near) == pytest.approx(
        max(up, down) / 100e6, rel=0.02
    )
    assert seconds("reducers", a_job, FAR_BUT_WIDE, **near) == pytest.approx(s / 100e6, rel=0.02)


def test_bytes_are_those_of_the_plan() -> None:
    a_job = job(64 * MB, 4, put_ratio=8, sum_ratio=4, reducers=NEAR_LINKS)
    found = {
        kind: predict(Plan(kind, MB, 8), a_job, [EXAMPLE])  # type: ignore[arg-type]
        for kind in ("all-gather", "sharded", "reducers")
    }
    moved = {kind: (cost.bytes_up / MB, cost.bytes_down / MB) for kind, cost in found.items()}
    assert moved == {
        "all-gather": (8, 24),
        "sharded": (8 + 16 / 4, 3 / 4 * (8 + 16)),
        "reducers": (8, 16),
    }


def test_uneven_shares_are_counted() -> None:
    # 5 chunks among 4: somebody has two, and reads three parts of each.
    cost = predict(Plan("sharded", MB, 8), job(5 * MB, 4), [EXAMPLE])
    assert cost.bytes_up == (5 + 2) * MB
    assert cost.bytes_down == (2 * 3 + 3) * MB


def test_a_lone_replica_only_keeps_its_contribution() -> None:
    cost = predict(Plan("all-gather", MB, 8), job(100e6, 1), [EXAMPLE], LISTED["s3"])
    assert cost.seconds == pytest.approx(1.08)
    assert (cost.bytes_up, cost.bytes_down, cost.agreement_s) == (100_000_000, 0, 0.0)


def test_nothing_to_send_takes_the_decision_alone() -> None:
    cost = predict(Plan("all-gather", MB, 8), job(0, 8), [EXAMPLE])
    trips = AGREEMENT_TRIPS + 1 + 2  # the headers, then a write and a read
    assert cost.seconds == pytest.approx(trips * 0.08)


def test_slow_codecs_bound_the_exchange() -> None:
    link = Link.of(10e9, 10e9, 0.001)
    slow = job(1e9, 8, decode_rate=1e9)
    assert seconds("all-gather", slow, link) > 8.0
    assert 2.0 < seconds("sharded", slow, link) < 2.5  # its own share of all, and the sums
    assert seconds("all-gather", job(1e9, 8, encode_rate=0.5e9), link) > 2.0


# -- links that differ ---------------------------------------------------------------------------


def test_the_slowest_of_each_direction_decides_whosever_it_is() -> None:
    slow_up, slow_down = Link.of(10e6, 1e9, 0.01), Link.of(1e9, 20e6, 0.01)
    fast, far = Link.of(1e9, 1e9, 0.01), Link.of(1e9, 1e9, 0.1)
    a_job, plan = job(1e9, 4), Plan("sharded", 4 * MB, 8)
    assert slowest([fast, slow_up, far, slow_down]) == Link.of(10e6, 20e6, 0.1)
    up_bound = predict(plan, a_job, [fast, slow_up, fast, fast]).seconds
    down_bound = predict(plan, a_job, [fast, slow_down, fast, fast]).seconds
    assert up_bound == pytest.approx(1.25e9 / 10e6, rel=0.02)
    assert down_bound == pytest.approx(1.5e9 / 20e6, rel=0.02)


def test_unknown_links_are_assumed() -> None:
    plan, a_job = Plan("sharded", 4 * MB, 8), job(1e9, 4)
    assert predict(plan, a_job, []) == predict(plan, a_job, [UNKNOWN])


# -- requests and money --------------------------------------------------------------------------


def test_requests_do_not_depend_on_how_many_tensors_but_on_chunks() -> None:
    cost = predict(Plan("sharded", 4 * MB, 8), job(256 * MB, 8), [EXAMPLE])
    assert cost.requests["create"] == 64 + 8 + 3  # chunks, sums, two headers and the commit
    assert cost.requests["get_range"] == 8 * 7 + 56 + 7  # parts, sums, headers


@pytest.mark.parametrize(
    ("kind", "chunk", "n", "chunk_looks"),
    [
        # Two chunks' parts of everybody are seen by one look, and as many sums as are read at once.
        ("sharded", 4 * MB, 8, 8 * 7 // 14 + 56 // 8),
        ("sharded", 4 * MB, 32, 2 * 31 // 62 + -(-62 // 8)),
        ("reducers", 4 * MB, 8, 64 // 8),
        # A 64th of the chunks, whoever sent them.
        ("all-gather", 4 * MB, 8, 64),
        ("all-gather", 4 * MB, 256, 64),
    ],
)
def test_looks_follow_from_what_they_find(kind: Any, chunk: int, n: int, chunk_looks: int) -> None:
    a_job = job(256 * MB, n, reducers=NEAR_LINKS)
    cost = predict(Plan(kind, chunk, 8), a_job, [EXAMPLE])
    decision, openings = AGREEMENT_TRIPS + 1, 3 if chunk_looks else 0
    read_s = cost.bytes_down / 100e6
    idle = (cost.seconds - read_s) / 0.075 if chunk_looks else 0
    least = decision + openings + chunk_looks
    assert least <= cost.requests["list"] <= least + idle


def test_who_waits_for_sums_looks_for_them_again_and_again() -> None:
    # With two, more is sent than read: a quarter of the time there is nothing to read.
    cost = predict(Plan("sharded", MB, 8), job(256 * MB, 2), [Link.of(25e6, 25e6, 0.03)])
    idle_s = cost.seconds - 256 * MB / 25e6
    assert idle_s > 5
    assert cost.requests["list"] == pytest.approx(idle_s / 0.075 + 2 * 128 / 8 + 9, abs=5)


def test_requests_of_an_all_gather_depend_on_whether_it_is_read_on_its_way() -> None:
    plan = Plan("all-gather", 2 * MB, 8)
    little, much = (predict(plan, job(s * MB, 2), [EXAMPLE]).requests for s in (16, 18))
    assert little["create"] == 2  # the contribution, and the commit
    assert little["get_range"] == 8 + 1  # reads of it, and of its header
    assert much["create"] == 9 + 3  # chunks, two headers and the commit
    assert much["get_range"] == 9 + 1


def test_an_all_gather_is_read_on_its_way_where_its_parts_are_worth_it() -> None:
    plan = Plan("all-gather", 2 * MB, 8)
    assert streams(plan, job(256 * MB, 2))
    assert streams(plan, job(256 * MB, 2, put_ratio=7.76))
    assert not streams(plan, job(16 * MB, 2))  # read and checked before the decision
    assert not streams(plan, job(2 * MB, 300))  # one chunk
    assert not streams(plan, job(6 * MB, 300))  # too few of them to overlap
    assert not streams(plan, job(8192 * MB, 2, put_ratio=217))  # of 10 kB
    assert streams(Plan("sharded", 2 * MB, 8), job(4 * MB, 2))


def test_dollars_of_an_all_gather_are_its_egress_and_its_requests() -> None:
    n, plan = 8, Plan("all-gather", 16 * MB, 8)
    a_job = job(GB, n)
    outside = predict(plan, a_job, [EXAMPLE], LISTED["s3"])
    inside = predict(plan, a_job, [EXAMPLE], LISTED["s3"], same_region=True)
    assert outside.dollars is not None
    assert inside.dollars is not None
    assert outside.dollars - inside.dollars == pytest.approx(n * (n - 1) * 0.09)
    # Per replica 7 x 60 reads of chunks, 7 of headers, 1 of the commit; 60 writes of chunks, 2 of
    # the header, and that of one commit; listings besides.
    chunks = -(-GB // (16 * MB))
    reads, writes = n * (7 * chunks + 7 + 1), n * (chunks + 2) + 1
    looks = n * inside.requests["list"]
    assert inside.dollars == pytest.approx(reads * 4e-7 + (writes + looks) * 5e-6)
    assert predict(plan, a_job, [EXAMPLE]).dollars is None


@pytest.mark.parametrize("kind", ["sharded", "reducers"])
def test_egress_is_what_replicas_read(kind: Any) -> None:
    a_job = job(GB, 8, put_ratio=2, reducers=NEAR_LINKS)
    plan = Plan(kind, 4 * MB, 8)
    outside, inside = (
        predict(plan, a_job, [EXAMPLE], LISTED["gs"], same_region=near).dollars
        for near in (False, True)
    )
    assert outside is not None
    assert inside is not None
    gigabytes = 7 * (0.5 + 1) if kind == "sharded" else 8 * 1
    assert outside - inside == pytest.approx(gigabytes * 0.12)


def test_cost_of_256_replicas_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    a_job = job(4 * 10**6, 256, put_ratio=217)
    cost = predict(Plan("all-gather", 4 * MB, 16), a_job, [EXAMPLE], LISTED["s3"])
    sys.stdout.write(f"{cost}\n")
    line = capsys.readouterr().out
    assert "255 get_range" not in line  # headers and contributions: twice as many
    assert "510 get_range" in line
    assert cost.dollars is not None
    assert f"${cost.dollars:.6f} for all" in line
    assert "no known price" in str(replace(cost, dollars=None))


# -- what must hold whatever the numbers ---------------------------------------------------------

KINDS = st.sampled_from(["all-gather", "sharded", "reducers"])
LINKS = st.builds(Link.of, st.floats(1e5, 1e10), st.floats(1e5, 1e10), st.floats(0, 1))
JOBS = st.builds(
    Job,
    nbytes=st.integers(0, 10**11),
    contributors=st.integers(1, 300),
    put_ratio=st.floats(0.5, 300),
    sum_ratio=st.floats(0.5, 300),
    encode_rate=st.floats(1e7, 1e12),
    decode_rate=st.floats(1e7, 1e12),
    reducers=st.lists(LINKS, max_size=3).map(tuple),
)
PLANS = st.builds(
    Plan,
    KINDS,
    st.sampled_from([512, MB, 4 * MB, 16 * MB]),
    st.integers(1, 32),
)


def cost_of(plan: Plan, a_job: Job, links: list[Link]) -> Cost | None:
    if not possible(plan, a_job) or a_job.nbytes > 10**5 * plan.chunk_bytes:
        return None
    return predict(plan, a_job, links, LISTED["s3"])


@given(PLANS, JOBS, st.lists(LINKS, min_size=1, max_size=4), st.floats(1, 10), st.data())
def test_worse_links_never_help(
    plan: Plan, a_job: Job, links: list[Link], factor: float, data: st.DataObject
) -> None:
    before = cost_of(plan, a_job, links)
    if before is None:
        return
    which = data.draw(st.integers(0, len(links) - 1))
    one = links[which]
    for worse in (
        Link.of(one.up / factor, one.down, one.latency),
        Link.of(one.up, one.down / factor, one.latency),
        Link.of(one.up, one.down, one.latency * factor),
    ):
        after = cost_of(plan, a_job, [*links[:which], worse, *links[which + 1 :]])
        assert after is not None
        assert after.seconds >= before.seconds * (1 - 1e-9)


@given(PLANS, JOBS, st.lists(LINKS, max_size=4), st.integers(0, 10**10), st.floats(1, 10))
def test_more_to_move_never_takes_less(
    plan: Plan, a_job: Job, links: list[Link], more: int, ratio: float
) -> None:
    more_job = replace(a_job, nbytes=a_job.nbytes + more)
    less_job = replace(a_job, put_ratio=a_job.put_ratio * ratio)
    before, larger, smaller = (cost_of(plan, one, links) for one in (a_job, more_job, less_job))

    def is_sent_alike(one: Job) -> bool:
        # Much that is read on its way may take less than little that is read afterwards.
        return streams(plan, one) == streams(plan, a_job)

    if before is not None and larger is not None and is_sent_alike(more_job):
        assert larger.seconds >= before.seconds * (1 - 1e-9)
        assert larger.bytes_up >= before.bytes_up
    if before is not None and smaller is not None and is_sent_alike(less_job):
        assert smaller.seconds <= before.seconds * (1 + 1e-9)


@given(PLANS, JOBS, st.permutations([Link.of(10.0**k, 10.0 ** (12 - k), k / 10) for k in range(9)]))
def test_prediction_does_not_depend_on_the_order_of_links(
    plan: Plan, a_job: Job, links: list[Link]
) -> None:
    assert cost_of(plan, a_job, links) == cost_of(plan, a_job, sorted(links))


@given(
    st.floats(1, 1e9),
    st.integers(1, 5000),
    st.floats(1e4, 1e10),
    st.floats(0, 2),
    st.integers(1, 64),
)
def test_carry_keeps_between_its_limits(
    nbytes: float, requests: int, rate: float, latency: float, parallel: int
) -> None:
    found = carry(nbytes, requests, rate, latency, parallel)
    one_by_one = requests * latency + nbytes / rate
    least = max(
        nbytes / rate, -(-requests // parallel) * latency * requests / (requests + parallel)
    )
    assert least * (1 - 1e-9) <= found <= (one_by_one + latency) * (1 + 1e-9)


def test_carry_tends_to_requests_per_latency_and_to_the_rate() -> None:
    assert carry(1.0, 1000, 1e12, 0.1, 8) == pytest.approx(1000 / 8 * 0.1)
    assert carry(1e9, 1000, 1e6, 1e-4, 8) == pytest.approx(1e3, rel=1e-3)
    assert carry(0.0, 0, 1e6, 0.1, 8) == 0.0
