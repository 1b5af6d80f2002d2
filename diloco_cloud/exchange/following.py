"""From one round's headers to the plan of the next, and from a plan to what a replica does.

All that goes into a plan is in the headers that a commit pins, so that whoever decides finds the
same one. A replica that follows another than the rest, or none, is in the round all the same: how
chunks are dealt is in its header, and only chunks of another size cannot be averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from diloco_cloud.exchange.codecs import get_codec
from diloco_cloud.exchange.contribution import RAW, Header
from diloco_cloud.exchange.layout import TensorLayout
from diloco_cloud.exchange.links import Link
from diloco_cloud.exchange.planning import candidates, choose
from diloco_cloud.exchange.prediction import Job, Kind, Plan
from diloco_cloud.exchange.processors import Rates
from diloco_cloud.exchange.streamed import is_streamed

_MB: Final = 2**20
#: Bits of a parameter that is not encoded.
RAW_BITS: Final = 32.0
#: Below this many bytes a second trip through the store costs more than reading everything.
SHARDED_FROM_BYTES: Final = 8 * _MB
#: Chunks of the first round: enough of them to fill a pipeline, and each worth its requests.
_FIRST_CHUNKS: Final = 128
_FIRST_CHUNK_BYTES: Final = (1 * _MB, 2 * _MB, 4 * _MB)
#: A volunteer is started where it is near the bucket: 10 Gbit/s, a quick answer.
_VOLUNTEER: Final = Link.of(1.25e9, 1.25e9, 0.02)
#: More make no difference, and anybody can claim any number.
_MOST_VOLUNTEERS: Final = 256
#: Raw over encoded size, whatever the headers say.
_LEAST_RATIO, _LARGEST_RATIO = 0.125, 1e5


def sums_of(codec: str) -> str:
    """How the means of chunks that are encoded with ``codec`` are encoded."""
    return RAW if codec == RAW else get_codec(codec).sums or RAW


def first_chunk_bytes(nbytes: int) -> int:
    """Size of chunks where there is no plan.

    Args:
        nbytes: of all tensors.
    """
    least, *larger = _FIRST_CHUNK_BYTES
    return max([least, *(size for size in larger if size * _FIRST_CHUNKS <= nbytes)])


def plan_next(headers: Sequence[Header], reduction: str, current: Plan | None) -> Plan | None:
    """The plan for a fragment's next round; None where nothing can be planned.

    Args:
        headers: of the contributions in the mean of this one, of one layout and codec.
        reduction: "all-gather", "sharded" or "auto", which the plan keeps to.
        current: the plan that this round was to follow.
    """
    job = _job(headers)
    kinds = _kinds(reduction, headers[0].codec, len(job.reducers))
    if next(candidates(job, kinds), None) is None:
        return None  # Too little to be dealt out.
    claims = (Link.claimed(header.up, header.down, header.latency) for header in headers)
    links = [link for link in claims if link is not None]
    went = _kind(headers[0])
    if not links and went in kinds and next(candidates(job, (went,)), None) is not None:
        kinds = (went,)  # There is nothing to choose another way by.
    # Of the last to arrive there is no wait for others in it.
    took_s = min((header.took_s for header in headers if header.took_s > 0), default=None)
    return choose(job, links, current=current, kinds=kinds, took_s=took_s)


def kind_of(
    plan: Plan | None,
    *,
    reduction: str,
    nbytes: int,
    codec: str,
    contributors: int,
    reducers: int,
) -> Kind:
    """Which way a contribution is to be sent.

    Args:
        plan: of the round, if there is one; only followed where ``reduction`` leaves a choice.
        reduction: "all-gather", "sharded" or "auto".
        nbytes: of all tensors.
        codec: by name.
        contributors: replicas that the round waits for.
        reducers: volunteers that there are.
    """
    if reduction == "auto" and plan is not None and (plan.kind != "reducers" or reducers):
        return plan.kind
    if reduction == "all-gather" or not (reducers or _is_worth_sharding(codec, contributors)):
        return "all-gather"
    # For two, shards spare nothing on the way down, and send more up.
    is_little = nbytes < SHARDED_FROM_BYTES or (contributors < 3 and not reducers)
    if reduction == "auto" and is_little:
        return "all-gather"
    return "reducers" if reducers else "sharded"


def dealt_by(
    plan: Plan | None,
    layout: TensorLayout,
    chunk_bytes: int,
    *,
    reduction: str,
    codec: str,
    contributors: int,
    reducers: int,
    streams_from: int | None = None,
) -> dict[str, Any]:
    """How many groups a contribution's chunks are dealt into, and for how many volunteers.

    Args:
        plan: of the round, if there is one, as of :func:`kind_of`.
        layout: of the tensors.
        chunk_bytes: of them, in one chunk.
        reduction: as of :func:`kind_of`.
        codec: by name.
        contributors: replicas that the round waits for.
        reducers: volunteers that there are.
        streams_from: bytes of tensors from which an all-gather's chunks are objects of their own;
            None: where that is worth its requests.

    Returns:
        What a header says of it; empty where a contribution is one object.
    """
    nbytes = layout.nbytes
    kind = kind_of(
        plan,
        reduction=reduction,
        nbytes=nbytes,
        codec=codec,
        contributors=contributors,
        reducers=reducers,
    )
    helped = reducers if kind == "reducers" else 0
    chunks = -(-nbytes // chunk_bytes)
    groups = min(helped or contributors, chunks)
    if kind != "all-gather" and groups >= (1 if helped else 2):
        return {"spread": groups, "reducers": helped}
    sent = nbytes if codec == RAW else layout.numel * _bits(codec) / 8
    if streams_from is None:
        streams = is_streamed(nbytes, sent, chunks, contributors)
    else:
        streams = nbytes >= max(1, streams_from)
    return {"spread": 1, "reducers": 0} if streams else {}


def _kind(header: Header) -> Kind:
    """The way that a contribution went."""
    if header.reducers:
        return "reducers"
    return "sharded" if header.spread and not header.is_for_all else "all-gather"


def _job(headers: Sequence[Header]) -> Job:
    first = headers[0]
    encoded = sum(sum(header.sizes) if header.sizes else header.nbytes for header in headers)
    ratio = sum(header.nbytes for header in headers) / max(encoded, 1)
    sums = sums_of(first.codec)
    claims = [(header.encode_rate, header.decode_rate) for header in headers]
    rates = Rates.claimed(claims, first.codec)
    volunteers = min([_MOST_VOLUNTEERS, *(header.volunteers for header in headers)])
    return Job(
        nbytes=first.nbytes,
        contributors=len(headers),
        put_ratio=min(max(ratio, _LEAST_RATIO), _LARGEST_RATIO),
        sum_ratio=RAW_BITS / _bits(sums),
        encode_rate=rates.encode,
        decode_rate=rates.decode,
        apart=min(1.0, max(header.apart for header in headers)),
        reducers=(_VOLUNTEER,) * volunteers,
    )


def _kinds(reduction: str, codec: str, reducers: int) -> tuple[Kind, ...]:
    """What a plan may be. Means of what has no sums of its own are dense: not worth sharding."""
    has_sums = codec == RAW or bool(get_codec(codec).sums)
    dealt: tuple[Kind, ...] = ("sharded",) if has_sums else ()
    if reducers:
        dealt = (*dealt, "reducers") if reduction == "auto" else ("reducers",)
    if reduction == "sharded" and dealt:
        return dealt
    return ("all-gather",) if reduction == "all-gather" else ("all-gather", *dealt)


def _is_worth_sharding(codec: str, contributors: int) -> bool:
    """Whether (N-1)/N of a contribution and of the means is no more than N-1 contributions."""
    sums = RAW if codec == RAW else get_codec(codec).sums
    return bool(sums) and contributors >= 1 + _bits(sums) / _bits(codec)


def _bits(codec: str) -> float:
    """Per parameter."""
    return RAW_BITS if codec == RAW else get_codec(codec).bits_per_parameter
