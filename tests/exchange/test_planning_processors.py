"""What a replica learns of its processors, and what a plan makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cloud.exchange.contribution import Header, decode
from diloco_cloud.exchange.following import plan_next
from diloco_cloud.exchange.links import Link
from diloco_cloud.exchange.prediction import Job, Plan, overlapped, predict
from diloco_cloud.exchange.processors import ProcessorMeter, Rates

MB = 2**20
HEADER = Header(
    kind="contribution",
    run="r",
    round=0,
    fragment=0,
    rank=0,
    attempt=0,
    layout="L",
    nbytes=64 * MB,
    codec="e3m0",
    sizes=(MB // 2,) * 16,
    up=6e6,
    down=6e6,
    latency=0.03,
)


class Time:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_overlapping_work_counts_once_and_pauses_not_at_all() -> None:
    time = Time()
    meter = ProcessorMeter(time)
    assert meter.rates == (0.0, 0.0)
    with meter.encoding(4 * MB):
        time.now += 2.0
    time.now += 100.0
    with meter.decoding(3 * MB), meter.decoding(3 * MB), meter.decoding():
        time.now += 1.0
    assert meter.rates == (2 * MB, 6 * MB)


def test_older_rounds_count_for_less() -> None:
    time = Time()
    meter = ProcessorMeter(time)
    for seconds in (1.0, 4.0, 4.0, 4.0, 4.0):
        with meter.encoding(4 * MB):
            time.now += seconds
        meter.end_round()
    assert meter.rates[0] == pytest.approx(MB, rel=0.1)


def test_the_slowest_claim_decides_and_what_nobody_measured_is_assumed() -> None:
    assert Rates.claimed([(3e9, 0.0), (2e9, 5e9), (0.0, 0.0)], "e3m0") == Rates(2e9, 5e9)
    assumed = Rates.claimed([(0.0, 0.0)], "e3m0")
    assert 0 < Rates.claimed([], "of another package").encode < assumed.encode
    assert Rates.claimed([(1e-300, 1e300)], "e3m0") == Rates(1e6, 1e12)


def test_a_plan_expects_what_processors_have_needed() -> None:
    fast = [replace(HEADER, rank=rank, encode_rate=1e12, decode_rate=1e12) for rank in range(8)]
    slow = [*fast[:7], replace(fast[7], encode_rate=64 * MB / 3.0)]
    plans = [plan_next(headers, "sharded", None) for headers in (fast, slow)]
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[1].expected_s - plans[0].expected_s == pytest.approx(3.0, rel=0.01)
    assert plan_next(slow[::-1], "sharded", None) == plans[1]


def test_a_header_without_rates_is_that_of_an_earlier_version() -> None:
    chunks = replace(HEADER, codec="raw", sizes=(), checksums="0" * 16 * 16)
    assert b"rate" not in chunks.encode()
    assert decode(chunks.encode(), "k") == chunks
    told = replace(chunks, encode_rate=5.0, decode_rate=7.0)
    assert decode(told.encode(), "k") == told


def test_stages_overlap_but_for_a_piece() -> None:
    assert overlapped(3.0, 2.0, 1) == 5.0
    assert overlapped(2.0, 3.0, 100) == pytest.approx(3.02)
    job = Job(
        nbytes=100 * MB, contributors=8, put_ratio=100, encode_rate=1e15, decode_rate=400 * MB
    )
    link, plan = Link.of(7 * MB, 7 * MB, 0.0), Plan("all-gather", 4 * MB, 8)
    # 7 MB are read and checked before any of it is averaged.
    assert predict(plan, job, [link]).seconds == pytest.approx(1 / 7 + 1.0 + 2.0, rel=0.01)
