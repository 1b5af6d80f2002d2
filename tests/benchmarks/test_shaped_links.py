"""The lines that the exchange is measured over: rate, delay, fairness, and what arrives."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import benchmark_modules  # noqa: F401  (makes the next import possible)
import pytest
from shaped_links import BURST_S, Flow, Lane, Links, shaped_links

MBIT_S = 80.0
RATE = MBIT_S * 1e6 / 8
ROUND_TRIP_S = 0.04


@pytest.fixture(scope="module")
def links() -> Iterator[Links]:
    """Two lines to a server that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        threading.Thread(target=_serve, args=(server,), daemon=True).start()
        address = server.getsockname()
        with shaped_links(address, count=2, mbit_s=MBIT_S, round_trip_s=ROUND_TRIP_S) as found:
            yield found


def _serve(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)


def _echoed(port: int, data: bytes) -> bytes:
    """What comes back of ``data`` through a line, both ways at once."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:

        def send() -> None:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        received = bytearray()
        while piece := connection.recv(1 << 16):
            received += piece
        sender.join()
    return bytes(received)


def test_shaped_links_carry_bytes_unchanged_and_no_faster_than_their_rate(links: Links) -> None:
    data = bytes(range(256)) * 4096  # 1 MiB
    began = time.monotonic()
    assert _echoed(links.ports[0], data) == data
    least = len(data) / RATE - BURST_S + ROUND_TRIP_S
    assert time.monotonic() - began >= 0.95 * least


def test_shaped_links_delay_a_reply_by_a_round_trip(links: Links) -> None:
    with socket.create_connection(("127.0.0.1", links.ports[0]), timeout=30) as connection:
        connection.sendall(b"handshake")
        connection.recv(16)
        began = time.monotonic()
        connection.sendall(b"request")
        connection.recv(16)
        # The loop adds up to two ticks of its own, which the delay takes into account.
        assert time.monotonic() - began >= 0.8 * ROUND_TRIP_S


def test_shaped_links_share_a_line_and_not_each_others(links: Links) -> None:
    data, ended = bytes(1 << 19), {}

    def transfer(name: str, port: int) -> None:
        _echoed(port, data)
        ended[name] = time.monotonic() - began

    began = time.monotonic()
    ports = {"a": links.ports[0], "b": links.ports[0], "alone": links.ports[1]}
    threads = [threading.Thread(target=transfer, args=one) for one in ports.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = 2 * len(data) / RATE - BURST_S
    assert max(ended["a"], ended["b"]) >= 0.95 * together
    assert ended["alone"] < max(ended["a"], ended["b"])


def test_shaped_links_pass_on_that_the_server_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with shaped_links(address, count=1, mbit_s=MBIT_S, round_trip_s=0.0) as links:
            client = socket.create_connection(("127.0.0.1", links.ports[0]), timeout=10)
            connection, _ = server.accept()
            connection.close()
            with client:
                assert client.recv(1) == b""


def test_lane_gives_each_flow_its_turn_at_the_nominal_rate() -> None:
    lane = Lane(rate=1e6, delay_s=0.01)
    ends = [socket.socketpair() for _ in range(4)]
    try:
        flows = [Flow(ends[0][1], ends[1][0], lane), Flow(ends[2][1], ends[3][0], lane)]
        for source in (ends[0][0], ends[2][0]):
            source.sendall(bytes(20_000))
        for pair in ends:
            for one in pair:
                one.setblocking(False)
        for flow in flows:
            lane.wake(flow)
        clock = 100.0
        arrived: list[float] = []
        for _ in range(100):
            lane.turn(clock)
            for index in (1, 3):
                try:
                    arrived += [clock] * len(ends[index][1].recv(1 << 16))
                except BlockingIOError:
                    continue
            clock += 0.001
        assert len(arrived) == 40_000
        assert arrived[0] >= 100.0 + 0.01
        seconds = arrived[-1] - arrived[0]
        assert seconds == pytest.approx(40_000 / 1e6 - BURST_S, abs=0.005)
    finally:
        for pair in ends:
            for one in pair:
                one.close()
