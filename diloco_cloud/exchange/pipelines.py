"""How long requests keep a link busy, and stages that follow one another.

Only sums, products, quotients and comparisons: the same numbers on every machine.
"""

from __future__ import annotations


def carry(nbytes: float, requests: int, rate: float, latency: float, parallel: int) -> float:
    """Seconds until a link has carried ``nbytes`` in equal requests, several under way at once.

    While one request waits for its answer, others use the link. How much of it they can fill is
    that of a closed queueing network of one server and a delay (exact mean value analysis, Reiser
    and Lavenberg 1980). It needs no constant, and tends to both limits: the link's rate where
    there is enough under way, ``parallel`` requests per latency where there is not.

    Args:
        nbytes: in all.
        requests: in how many.
        rate: of the link, bytes per second.
        latency: seconds from a request to the first byte of its answer.
        parallel: the most that are under way.
    """
    if requests == 0:
        return 0.0
    service = nbytes / requests / rate
    queue, cycle = 0.0, latency
    customers = min(parallel, requests)
    for count in range(1, customers + 1):
        response = service * (1 + queue)
        cycle = latency + response
        queue = count * response / cycle if cycle > 0 else 0.0
    return max(requests * cycle / customers, latency + nbytes / rate)


def overlapped(one: float, other: float, pieces: int, apart: float = 0.0) -> float:
    """Seconds of two stages that go on at the same time, but for one of ``pieces`` equal pieces.

    Args:
        one: seconds.
        other: seconds.
        pieces: of each stage.
        apart: the part of the shorter one in which the longer one stands still all the same.
    """
    return max(one, other) + min(one, other) * max(apart, 1 / pieces)
