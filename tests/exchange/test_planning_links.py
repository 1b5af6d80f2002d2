"""What a replica learns of its link."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_cloud.exchange.links import SMALL_BYTES, Link, LinkMeter

MB = 2**20


class Time:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time() -> Time:
    return Time()


def a_link(meter: LinkMeter) -> Link:
    link = meter.link
    assert link is not None
    return link


def warm(meter: LinkMeter, time: Time, latency: float = 0.0) -> None:
    """Let the meter know the latency, and one transfer each way at 1 MB/s."""
    meter.answered(latency)
    for way in (meter.sending, meter.receiving):
        with way(MB):
            time.after(latency + 1.0)


def test_link_is_unknown_until_both_directions_and_an_answer_were_seen(time: Time) -> None:
    meter = LinkMeter(now=time)
    assert meter.link is None
    with meter.sending(MB):
        time.after(1.0)
    with meter.receiving(2 * MB):
        time.after(0.5)
    assert meter.link is None
    meter.answered(0.02)
    assert a_link(meter) == Link(up=MB, down=4 * MB, latency_us=20_000)


def test_link_counts_overlapping_transfers_once(time: Time) -> None:
    meter = LinkMeter(now=time)
    warm(meter, time)
    # Four at once, of 1 MB each, take 2 s: 2 MB/s, and not 0.5.
    with ExitStack() as under_way:
        for _ in range(4):
            under_way.enter_context(meter.sending(MB))
        time.after(2.0)
    assert a_link(meter).up == pytest.approx(5 * MB / 3, rel=1e-6)


def test_link_leaves_pauses_out(time: Time) -> None:
    meter = LinkMeter(now=time)
    warm(meter, time)
    before = a_link(meter)
    time.after(3600.0)  # of training
    with meter.sending(MB):
        time.after(1.0)
    assert a_link(meter) == before


def test_link_leaves_the_wait_for_the_first_byte_out(time: Time) -> None:
    meter = LinkMeter(now=time)
    warm(meter, time, latency=0.5)
    assert a_link(meter) == Link(up=MB, down=MB, latency_us=500_000)


def test_link_is_known_where_its_transfers_were_quicker_than_any_small_request(time: Time) -> None:
    """As on a busy machine, whose small requests were kept waiting."""
    meter = LinkMeter(now=time)
    meter.answered(0.02)
    with meter.sending(MB):
        time.after(0.01)
    with meter.receiving(MB):
        time.after(0.02)
    assert a_link(meter) == Link(up=100 * MB, down=50 * MB, latency_us=20_000)


def test_link_takes_a_failed_transfer_as_time_in_which_nothing_moved(time: Time) -> None:
    meter = LinkMeter(now=time)
    warm(meter, time)

    def fails() -> None:
        with meter.receiving(100 * MB):
            time.after(1.0)
            raise OSError("cut off")

    with pytest.raises(OSError, match="cut off"):
        fails()
    assert a_link(meter).down == pytest.approx(MB / 2)


def test_small_requests_tell_the_latency_and_not_the_rate(time: Time) -> None:
    meter = LinkMeter(now=time)
    warm(meter, time, latency=0.08)
    rates = a_link(meter).up, a_link(meter).down
    for _ in range(100):
        with meter.receiving(SMALL_BYTES - 1):
            time.after(0.02)
    assert a_link(meter).latency == pytest.approx(0.02, rel=0.01)
    assert (a_link(meter).up, a_link(meter).down) == rates


def test_latency_is_that_of_an_idle_link(time: Time) -> None:
    meter = LinkMeter(now=time)
    warm(meter, time, latency=0.03)
    for seconds in (0.4, 0.9, 0.03, 2.0):  # most queue behind what the replica itself moves
        meter.answered(seconds)
    assert a_link(meter).latency == pytest.approx(0.03)


def test_latency_that_has_grown_is_known_after_two_rounds(time: Time) -> None:
    meter = LinkMeter(now=time)
    warm(meter, time, latency=0.03)
    for _ in range(2):
        meter.end_round()
        meter.answered(0.2)
    assert a_link(meter).latency == pytest.approx(0.2)
    meter.end_round()
    meter.end_round()  # in which nothing was asked
    assert a_link(meter).latency == pytest.approx(0.2)


def test_link_follows_a_change_within_a_few_rounds(time: Time) -> None:
    meter = LinkMeter(now=time)
    warm(meter, time)
    for _ in range(5):
        meter.end_round()
        for way in (meter.sending, meter.receiving):
            with way(10 * MB):
                time.after(1.0)
    assert a_link(meter).up == pytest.approx(10 * MB, rel=0.05)


def test_a_round_counts_by_how_much_it_moved(time: Time) -> None:
    meter = LinkMeter(now=time)
    meter.answered(0.0)
    for way in (meter.sending, meter.receiving):
        with way(1000 * MB):
            time.after(100.0)
    meter.end_round()
    with meter.sending(MB):  # little moved, and slowly: a hiccup
        time.after(1.0)
    assert a_link(meter).up == pytest.approx(10 * MB, rel=0.02)


def test_meter_takes_reports_from_many_threads() -> None:
    meter = LinkMeter()
    meter.answered(0.0)
    start = threading.Barrier(8)

    def work() -> None:
        start.wait(timeout=10)
        for _ in range(200):
            with meter.sending(MB), meter.receiving(MB):
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    # Private, but what a lost update would spoil: all bytes counted, nothing left under way.
    assert meter._up.nbytes == meter._down.nbytes == 1600 * MB
    assert meter._up.active == meter._down.active == 0


@pytest.mark.parametrize("up_down", [(0.0, 1e6), (1e6, 0.0), (0.0, 0.0)])
def test_a_header_without_rates_claims_no_link(up_down: tuple[float, float]) -> None:
    assert Link.claimed(*up_down, 0.1) is None


@given(
    st.floats(0, exclude_min=True, allow_infinity=False),
    st.floats(0, exclude_min=True, allow_infinity=False),
    st.floats(0, allow_infinity=False),
)
def test_whatever_is_claimed_becomes_a_link_that_there_can_be(
    up: float, down: float, latency: float
) -> None:
    link = Link.claimed(up, down, latency)
    assert link is not None
    assert all(10_000 <= rate <= 10**11 for rate in (link.up, link.down))
    assert 0.0 <= link.latency <= 10.0
    assert Link.claimed(link.up, link.down, link.latency) == link  # and stays it
