"""What is measured: contenders, and the bytes that bound them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Protocol

from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce

#: Of our contenders, whether this version of the package has them.
PARAMETERS = inspect.signature(ObjectStoreAllReduce).parameters


@dataclass(frozen=True)
class Contender:
    """One way of exchanging, or the limit of one.

    Attributes:
        name: in tables.
        kind: "ours", "reference" or "limit".
        options: of ``ObjectStoreAllReduce``, for ours.
        reducers: volunteers that are started beside the replicas, for ours.
        up, down: bytes that each replica sends and receives in a round, for a limit.
    """

    name: str
    kind: str
    options: dict[str, str] = field(default_factory=dict)
    reducers: int = 0
    up: int = 0
    down: int = 0

    @property
    def codec(self) -> str:
        return self.options.get("codec", "fp32")

    @property
    def is_lossless(self) -> bool:
        return self.codec == "fp32"


def ours(reduction: str, codec: str, reducers: int = 0) -> Contender:
    """One of our modes."""
    options = {"reduction": reduction}
    if codec != "fp32":
        options["codec"] = codec
    name = f"{reduction} {codec}" + f", {reducers} reducers" * bool(reducers)
    return Contender(name, "ours", options, reducers)


def is_supported(contender: Contender) -> bool:
    """Whether this version of the package has what the contender needs."""
    if contender.reducers and find_spec("diloco_cloud.exchange.volunteer") is None:
        return False
    return contender.kind != "ours" or set(contender.options) <= set(PARAMETERS)


def reference(name: str) -> Contender:
    """One of the references."""
    return Contender(name, "reference")


def limit(contender: Contender, nbytes: int, replicas: int, moved: Moved) -> Contender:
    """The limit of one of ours: a bulk transfer of the same bytes.

    For fp32 they are what the mode cannot do without: everybody's contribution of S bytes goes up;
    down come N - 1 contributions (all-gather), or a shard of each of the others and then the
    others' sums, 2S(N-1)/N, with one more shard's sum going up (sharded), or the sum, S
    (reducers). A codec's own sizes are not known beforehand: there they are what the mode moved.

    Args:
        contender: of ours.
        nbytes: S.
        replicas: N.
        moved: what each replica sent and received, at most.
    """
    up, down = moved.sent, moved.received
    if contender.is_lossless:
        if contender.reducers:
            up, down = nbytes, nbytes
        elif contender.options["reduction"] == "sharded":
            up, down = nbytes + nbytes // replicas, 2 * nbytes * (replicas - 1) // replicas
        else:
            up, down = nbytes, nbytes * (replicas - 1)
    name = f"limit of {contender.name}"
    return Contender(name, "limit", up=up, down=down)


class Moved(Protocol):
    """Bytes of a round."""

    @property
    def sent(self) -> int: ...

    @property
    def received(self) -> int: ...
