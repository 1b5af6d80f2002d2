"""What a replica learns of its processors, and what a plan makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diloco_cloud.exchange.contributing import Contributing
from diloco_cloud.exchange.contribution import Header, decode
from diloco_cloud.exchange.following import plan_next
from diloco_cloud.exchange.links import Link, LinkMeter, Overlap
from diloco_cloud.exchange.pipelines import overlapped
from diloco_cloud.exchange.prediction import Job, Plan, predict
from diloco_cloud.exchange.processors import ProcessorMeter, Rates
from diloco_cloud.exchange.work import Work
from diloco_cloud.store.memory import MemoryStore

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


def test_what_goes_on_at_the_same_time_is_not_apart() -> None:
    time = Time()
    overlap = Overlap(time)
    assert overlap.apart == 0.0
    with overlap.receiving():
        time.now += 3.0
        with overlap.averaging():
            time.now += 1.0
    assert overlap.apart == 0.0
    time.now += 100.0
    with overlap.averaging():
        time.now += 1.0  # Two seconds in all, of which the other stood still for one.
    assert overlap.apart == pytest.approx(0.5)


def test_turns_on_one_processor_are_apart_and_forgotten_in_time() -> None:
    time = Time()
    meter = LinkMeter(time)
    processor = ProcessorMeter(time, overlap=meter.overlap)
    for _ in range(4):
        with meter.receiving(MB):
            time.now += 1.0
        with processor.decoding(MB):
            time.now += 1.0
    assert meter.overlap.apart == 1.0
    meter.end_round()
    for _ in range(36):
        with meter.receiving(MB), processor.decoding(MB):
            time.now += 1.0
    assert meter.overlap.apart == pytest.approx(2 / 38)


def test_looks_while_others_are_waited_for_are_not_apart() -> None:
    time = Time()
    meter = LinkMeter(time)
    processor = ProcessorMeter(time, overlap=meter.overlap)
    for _ in range(20):
        with meter.receiving(0):  # A listing.
            time.now += 0.05
        time.now += 0.5
    with meter.receiving(MB), processor.decoding(MB):
        time.now += 1.0
    with processor.decoding(MB):
        time.now += 1.0
    assert meter.overlap.apart == 0.0


def test_a_plan_expects_what_cannot_go_on_together_one_after_the_other() -> None:
    whole = replace(HEADER, sizes=(7 * MB // 16,) * 16, decode_rate=8 * MB)  # in too small chunks
    rates = [replace(whole, rank=rank) for rank in range(8)]
    told = [*rates[:7], replace(rates[7], apart=1.0)]
    plans = [plan_next(headers, "all-gather", None) for headers in (rates, told)]
    assert plans[0] is not None
    assert plans[1] is not None
    received_s = 7 * 7 * MB / 6e6  # in so many reads, of which the first is alone in any case
    reads = -(-7 * MB // plans[0].chunk_bytes)
    longer_s = plans[1].expected_s - plans[0].expected_s
    assert longer_s == pytest.approx(received_s * (1 - 1 / reads), rel=0.01)


def test_what_a_round_took_corrects_what_the_next_is_expected_to() -> None:
    headers = [replace(HEADER, rank=rank) for rank in range(8)]
    current = plan_next(headers, "all-gather", None)
    assert current is not None
    model_s = current.expected_s
    # All but the last to arrive have waited for others.
    told = [replace(one, took_s=model_s * (1.5 + one.rank)) for one in headers[:-1]]
    found = plan_next([*told, headers[-1]], "all-gather", current)
    assert found is not None
    assert found.expected_s == pytest.approx(1.5 * model_s)
    claims = [replace(one, took_s=1e300) for one in headers]
    wild = plan_next(claims, "all-gather", current)
    assert wild is not None
    assert wild.expected_s == pytest.approx(4 * model_s)
    other = plan_next(told, "all-gather", None)
    assert other is not None
    assert other.expected_s == pytest.approx(model_s, rel=0.2)


@pytest.mark.parametrize("reduction", ["all-gather", "sharded"])
def test_a_contribution_tells_how_long_the_round_before_took(reduction: str) -> None:
    own = Contributing(MemoryStore("took"), "run", 0, 0, reduction=reduction, chunk_bytes=1024)

    def header(fragment: int = 0) -> Header:
        return own.pack(0, fragment, [torch.ones(4000)], Work(), contributors=3).own.header

    first = header()
    assert first.took_s == 0.0
    own.end_round(first, 2.5)
    assert header().took_s == 2.5
    assert header(fragment=1).took_s == 0.0
    assert decode(header().encode(), "k").took_s == 2.5
    own.chunk_bytes = 2048
    assert header().took_s == 0.0


def test_stages_overlap_but_for_a_piece() -> None:
    assert overlapped(3.0, 2.0, 1) == 5.0
    assert overlapped(2.0, 3.0, 100) == pytest.approx(3.02)
    assert overlapped(2.0, 3.0, 100, 0.25) == 3.5
    job = Job(
        nbytes=100 * MB, contributors=8, put_ratio=100, encode_rate=1e15, decode_rate=400 * MB
    )
    link, plan = Link.of(7 * MB, 7 * MB, 0.0), Plan("all-gather", 4 * MB, 8)
    # 7 MB are read and checked before any of it is averaged.
    assert predict(plan, job, [link]).seconds == pytest.approx(1 / 7 + 1.0 + 2.0, rel=0.01)
