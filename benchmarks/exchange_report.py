"""The page that tells what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

import measured
from exchange_results import Result

HEADER = (
    "",
    "s",
    "s / limit",
    "planned / s",
    "reference / s",
    "one object / s",
    "fast / s",
    "MiB up",
    "MiB down",
    "requests",
    "missed",
    "CPU s",
    "server",
    "busy",
    "peak / S",
    "result",
)

NOTES = """\
A round lasts from the moment when all replicas are let go to the moment when the last one has its
mean. Medians of {rounds} after one to warm up; of references, {reference_rounds}.

* **limit**: as many bytes cross the same links, both ways at once, by the same client, and nothing
  else happens. For fp32 they are S up and (N-1)S down (all-gather), S(1+1/N) up and 2S(N-1)/N down
  (sharded), S up and S down (reducers); for a codec they are those that it moved.
* **reference**: a tensor at a time, pickled, with a look for each peer every second; **one
  object**: all tensors at once; **fast**: that without pickles, with 20 looks a second.
* **planned**: what the planner had expected of the round, from what the links carried before.
* **MiB**, **requests** and **peak** are of the replica with most: in a round, and the memory over
  its tensors at any time. **missed**: GETs and HEADs that met nothing.
* **CPU s** of all replicas and volunteers, and of the **server**, in a round; **busy**: of the
  machine's CPU time, whoever used it. Near 100 %, the CPU was measured rather than the links.
* **result**: *exact*, all replicas have the bytes of a mean that was found slowly; or the relative
  L2 error of the mean, the same bytes on all; or DIFFER. A sparse mean lacks what comes in later
  rounds, and has what earlier ones left.
"""

#: What a request is called at a store, by the beginning of a method's name.
_KINDS = {"get": "GET", "head": "HEAD", "create": "PUT", "put": "PUT", "list": "LIST"}


def page(results: Sequence[Result], rounds: int, reference_rounds: int) -> str:
    """All that was measured: a table per store and cell."""
    notes = NOTES.format(rounds=rounds, reference_rounds=reference_rounds)
    parts = [notes]
    for (store, replicas, mib), group in groupby(
        results, key=lambda one: (one.store, one.replicas, one.mib)
    ):
        parts += [f"## {store}: N = {replicas}, S = {mib:g} MiB", table(list(group))]
    return "\n\n".join(part.strip() for part in parts)


def table(results: Sequence[Result]) -> str:
    """One cell: limits, ours, references."""
    anchors = {one.name: one.seconds for one in results if one.kind == "reference"}
    order = {"ours": 0, "reference": 1, "limit": 2}
    rows = [_row(one, anchors) for one in sorted(results, key=lambda one: order[one.kind])]
    return measured.table(HEADER, rows)


def _row(one: Result, anchors: dict[str, float]) -> list[str]:
    against = [
        f"{anchors[name] / one.seconds:.1f}" if name in anchors and one.kind != "limit" else ""
        for name in ("reference", "reference-one-object", "reference-fast")
    ]
    return [
        f"{one.name}: {rate(one):.0f} Mbit/s" if one.kind == "limit" else one.name,
        f"{one.seconds:.2f}",
        f"{one.seconds / one.limit_s:.2f}" if one.limit_s else "",
        f"{one.planned:.2f}" if one.planned else "",
        *against,
        f"{one.sent / 2**20:.4g}",
        f"{one.received / 2**20:.4g}",
        requests(one),
        f"{one.missed:.1%}",
        f"{one.replica_cpu_s:.2f}",
        f"{one.server_cpu_s:.2f}",
        f"{one.busy:.0%}",
        f"{one.peak:.0%}",
        verdict(one),
    ]


def rate(one: Result) -> float:
    """Mbit/s of each replica, in the direction in which it moved more."""
    return 8e-6 * max(one.sent, one.received) / one.seconds


def requests(one: Result) -> str:
    """How many of each kind."""
    kinds = Counter[str]()
    for method, count in one.requests.items():
        kinds[_KINDS.get(method.partition("_")[0], "DELETE")] += count
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def verdict(one: Result) -> str:
    """What the replicas ended with."""
    if one.agree is None:
        return ""
    if not one.agree:
        return "**DIFFER**"
    return "exact" if one.exact else f"error {one.error:.2g}"


def failures(results: Iterable[Result]) -> list[str]:
    """Contenders whose replicas did not get what they should have."""
    return [
        f"{one.store}, N = {one.replicas}, S = {one.mib:g} MiB: {one.name}: {verdict(one)}"
        for one in results
        if one.agree is False or one.exact is False
    ]
