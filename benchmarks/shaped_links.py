"""Slow, distant links in userspace: a proxy that gives every replica a line of its own to a server.

    with shaped_links(("127.0.0.1", 8333), count=8, mbit_s=200, round_trip_s=0.03) as links:
        links.ports[3]      # replica 3 finds the server here, behind its own line

A line is full duplex. Each direction is a token bucket that all connections of the line share, in
turns, before a delay of half a round trip; a new connection costs one round trip more, as its
handshake would. What waits for its turn waits in the sender's socket, so the sender feels the
line. Kernels of small virtual machines often lack ``netem``, and namespaces want root; this needs
neither. Rates count payload bytes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import select
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final

#: Pause between two turns of the loop while anything is on its way: few turns cost little CPU.
TICK_S: Final = 0.002
#: How far a bucket fills while its line is idle, in seconds of the rate: makes up for late turns.
BURST_S: Final = 0.012
#: Pause between two looks for connections that have ended.
TIDY_S: Final = 0.2
#: Bytes that a connection may have on its way or undelivered, in round trips and at least.
WINDOW_ROUND_TRIPS: Final = 4
SMALLEST_WINDOW: Final = 1 << 20
_EVENTS: Final = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


@dataclass(frozen=True)
class Links:
    """Lines under way.

    Attributes:
        ports: of 127.0.0.1, one per line.
        pid: of the process that carries them.
    """

    ports: tuple[int, ...]
    pid: int


@contextlib.contextmanager
def shaped_links(
    server: tuple[str, int], *, count: int, mbit_s: float, round_trip_s: float
) -> Iterator[Links]:
    """Carry ``count`` lines to ``server`` in a process of its own, until the block ends.

    Args:
        server: address and port.
        count: lines.
        mbit_s: of each line, each way, in 10**6 bit per second.
        round_trip_s: of an empty line.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, server, count, mbit_s * 1e6 / 8, round_trip_s / 2)
    process = context.Process(target=_carry, args=arguments, name="links", daemon=True)
    process.start()
    theirs.close()
    try:
        yield Links(ours.recv(), process.pid or 0)
    finally:
        process.kill()
        process.join()


def _carry(
    parent: Connection, server: tuple[str, int], count: int, rate: float, delay_s: float
) -> None:
    proxy = Proxy(server, rate, max(delay_s - TICK_S, 0.0))  # the loop's turns take the rest
    parent.send(tuple(proxy.listen() for _ in range(count)))
    proxy.run(parent)


@dataclass(eq=False)
class Flow:
    """One direction of one connection.

    Attributes:
        not_before: when its first byte may set out.
        readable: whether it waits for its turn.
        outstanding: bytes read that the sink has not taken, on the line or arrived.
        arrived: what the sink has not taken yet; no bytes are the end.
        ended: the source has no more.
        closed: the sink has got everything, or takes no more.
    """

    source: socket.socket
    sink: socket.socket
    lane: Lane
    not_before: float = 0.0
    readable: bool = False
    outstanding: int = 0
    arrived: deque[memoryview] = field(default_factory=deque)
    ended: bool = False
    closed: bool = False

    def deliver(self) -> None:
        """Give the sink what it takes of what has arrived."""
        try:
            while self.arrived and not self.closed:
                head = self.arrived.popleft()
                if not head:
                    self.closed = True
                    self.sink.shutdown(socket.SHUT_WR)
                elif rest := head[self._send(head) :]:
                    self.arrived.appendleft(rest)
                    return
        except OSError:
            self.closed = True

    def _send(self, data: memoryview) -> int:
        try:
            sent = self.sink.send(data)
        except BlockingIOError:
            return 0
        self.outstanding -= sent
        return sent


@dataclass(eq=False)
class Lane:
    """One direction of one line: a token bucket before a delay line.

    Attributes:
        rate: bytes per second.
        delay_s: from leaving the bucket to arriving.
        free_at: when the bucket lets the next byte through.
        waiting: flows that have something to send, in their turn.
        under_way: (arrival, flow, bytes), in order; no bytes are an end.
    """

    rate: float
    delay_s: float
    free_at: float = 0.0
    waiting: deque[Flow] = field(default_factory=deque)
    under_way: deque[tuple[float, Flow, bytes]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.quantum = int(min(max(self.rate * TICK_S, 1 << 11), 1 << 18))
        round_trips = WINDOW_ROUND_TRIPS * 2 * self.delay_s * self.rate
        self.window = max(int(round_trips), SMALLEST_WINDOW)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.under_way)

    def wake(self, flow: Flow) -> None:
        """Note that a flow has something to send."""
        if not flow.readable and not flow.ended:
            flow.readable = True
            self.waiting.append(flow)

    def turn(self, now: float) -> None:
        """Deliver what is due, then let in what the bucket has tokens for."""
        while self.under_way and self.under_way[0][0] <= now:
            _, flow, data = self.under_way.popleft()
            flow.arrived.append(memoryview(data))
            flow.deliver()
        self.free_at = max(self.free_at, now - BURST_S)
        held = 0
        while self.free_at <= now and held < len(self.waiting):
            flow = self.waiting.popleft()
            if flow.closed:
                continue
            if flow.not_before > now or flow.outstanding >= self.window:
                self.waiting.append(flow)
                held += 1
            elif self._admit(flow, now):
                self.waiting.append(flow)
                held = 0

    def _admit(self, flow: Flow, now: float) -> bool:
        """Read a quantum from a flow; whether it may have more."""
        try:
            data = flow.source.recv(self.quantum)
        except BlockingIOError:
            flow.readable = False
            return False
        except OSError:
            data = b""
        self.free_at += len(data) / self.rate
        leaves = max(self.free_at, now)  # what a full bucket lets through leaves at once
        self.under_way.append((leaves + self.delay_s, flow, data))
        flow.outstanding += len(data)
        flow.ended = not data
        return not flow.ended


class Proxy:
    """Carries lines to one server, in one thread.

    Args:
        server: address and port.
        rate: of each line and direction, in bytes per second.
        delay_s: of each direction.
    """

    def __init__(self, server: tuple[str, int], rate: float, delay_s: float) -> None:
        self._server, self._rate, self._delay_s = server, rate, delay_s
        self._epoll = select.epoll()
        self._listeners: dict[int, tuple[socket.socket, Lane, Lane]] = {}
        self._lanes: list[Lane] = []
        #: By descriptor: what is read from the socket, and what is written to it.
        self._flows: dict[int, tuple[Flow, Flow]] = {}

    def listen(self) -> int:
        """Open one more line; its port."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        listener.setblocking(False)
        up, down = (Lane(self._rate, self._delay_s) for _ in range(2))
        self._lanes += [up, down]
        self._listeners[listener.fileno()] = (listener, up, down)
        self._epoll.register(listener, select.EPOLLIN)
        return int(listener.getsockname()[1])

    def run(self, until: Connection) -> None:
        """Carry until the other end of ``until`` is closed."""
        self._epoll.register(until, select.EPOLLHUP | select.EPOLLRDHUP)
        tidied = time.monotonic()
        while True:
            busy = any(lane.busy for lane in self._lanes)
            if busy:
                time.sleep(TICK_S)
            for descriptor, event in self._epoll.poll(0 if busy else -1):
                if descriptor == until.fileno():
                    return
                self._meet(descriptor, event)
            now = time.monotonic()
            for lane in self._lanes:
                lane.turn(now)
            if now >= tidied + TIDY_S:
                tidied = now
                self._tidy()

    def _meet(self, descriptor: int, event: int) -> None:
        if descriptor in self._listeners:
            self._accept(*self._listeners[descriptor])
        elif descriptor in self._flows:
            reading, writing = self._flows[descriptor]
            if event & select.EPOLLOUT:
                writing.deliver()
            if event & ~select.EPOLLOUT:
                reading.lane.wake(reading)

    def _accept(self, listener: socket.socket, up: Lane, down: Lane) -> None:
        client, _ = listener.accept()
        server = socket.create_connection(self._server)
        for one in (client, server):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshaken = time.monotonic() + 2 * self._delay_s
        there = Flow(client, server, up, not_before=handshaken)
        back = Flow(server, client, down)
        self._flows[client.fileno()] = (there, back)
        self._flows[server.fileno()] = (back, there)
        for one in (client, server):
            self._epoll.register(one, _EVENTS)

    def _tidy(self) -> None:
        """Close connections that have ended both ways."""
        for there, back in list(self._flows.values()):
            if there.closed and back.closed and there.source.fileno() in self._flows:
                for one in (there.source, back.source):
                    del self._flows[one.fileno()]
                    self._epoll.unregister(one)
                    one.close()
