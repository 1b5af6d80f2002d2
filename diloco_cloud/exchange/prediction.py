"""How long a round's exchange takes and what it costs, from the links and the plan.

Every term is a path from the first byte to the last: bytes over the rate of the link that carries
them, plus what fills and drains the pipeline. The slowest path is the prediction. Since everybody
moves the same number of bytes, the slowest upload and the slowest download of the fleet decide,
whosever they are. With S raw bytes, N contributors, P = S / put_ratio sent of a
contribution and Q = S / sum_ratio of the sums:

============  =====================  ==========================  ================================
plan          up                     down                        seconds, one link B, S large
============  =====================  ==========================  ================================
all-gather    P                      (N-1) P                     max(up, down) / B: overlapped
... if small  P                      (N-1) P                     N P / B: up, then down
sharded       P + Q/N                (N-1)/N (P + Q)             max(up, down) / B: overlapped
reducers      P                      Q                           max(P, Q) / B: overlapped
============  =====================  ==========================  ================================

Only sums, products, quotients and comparisons are used, each of which IEEE 754 rounds in one way:
the same numbers on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from diloco_cloud.exchange.links import UNKNOWN, Link
from diloco_cloud.exchange.pacing import Pace
from diloco_cloud.exchange.pipelines import carry, overlapped
from diloco_cloud.exchange.streamed import KEEP_BYTES, columns, columns_a_look, is_streamed
from diloco_cloud.store.prices import Prices

Kind: TypeAlias = Literal["all-gather", "sharded", "reducers"]

#: Answers that a decision waits for, one after the other: a contribution's header is written, the
#: listing shows the last, the commit is created, a listing shows it, it is read.
AGREEMENT_TRIPS: Final = 5
#: Answers until the header that goes ahead of a contribution is seen: it is written, and listed.
_OPENING_TRIPS: Final = 2
#: Seconds between looks for sums while there are none, and looks for one: the pauses grow.
_IDLE_LOOK_S: Final = 0.075
_IDLE_LOOKS: Final = 3
#: Keys in one page of a listing.
_PAGE: Final = 1000


@dataclass(frozen=True)
class Plan:
    """How a round is reduced.

    Attributes:
        kind: which way the bytes go.
        chunk_bytes: raw bytes that are encoded, reduced and sent together. Of an all-gather of
            whole contributions, which needs no such unit, the encoded bytes of one ranged read.
        parallel: requests under way at once, each way.
        expected_s: seconds that a round was predicted to take when this was chosen; 0: not said.
    """

    kind: Kind
    chunk_bytes: int
    parallel: int
    expected_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a round has to move.

    Attributes:
        nbytes: raw payload of one contribution.
        contributors: how many there are.
        put_ratio: raw over encoded size of a contribution.
        sum_ratio: of a sum.
        encode_rate: raw bytes per second that one replica encodes and checksums, which comes first:
            the header that goes ahead names every chunk.
        decode_rate: raw bytes per second that one replica decodes and adds, of contributions, and
            of means, whose encoding is in it.
        apart: from 0 to 1, how far a replica cannot receive and average at the same time.
        reducers: links of the volunteer reducers.
    """

    nbytes: int
    contributors: int
    put_ratio: float = 1.0
    sum_ratio: float = 1.0
    encode_rate: float = 4e9
    decode_rate: float = 8e9
    apart: float = 0.0
    reducers: tuple[Link, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a plan is expected to take.

    Attributes:
        seconds: from when the last replica has something to send until all have the result.
        agreement_s: from the last upload to the decision. An all-gather of whole contributions
            begins to read after it, the others go on meanwhile.
        bytes_up, bytes_down: of the replica with the most.
        requests: of that replica, by method of the store protocol.
        dollars: of all replicas together, for requests and traffic; None without prices.
    """

    seconds: float
    agreement_s: float
    bytes_up: int
    bytes_down: int
    requests: Mapping[str, int]
    dollars: float | None = None

    def __str__(self) -> str:
        requests = ", ".join(f"{count} {name}" for name, count in sorted(self.requests.items()))
        dollars = "no known price" if self.dollars is None else f"${self.dollars:.6f} for all"
        return (
            f"{self.seconds:.2f} s, {self.bytes_up / 1e6:.1f} MB up and "
            f"{self.bytes_down / 1e6:.1f} MB down per replica; {requests}; {dollars}"
        )


def predict(
    plan: Plan,
    job: Job,
    links: Sequence[Link] = (),
    prices: Prices | None = None,
    *,
    same_region: bool = False,
) -> Cost:
    """What a round costs under a plan.

    Args:
        plan: must be :func:`possible`.
        job: what is moved.
        links: that the contributors have measured, in any order; none: :data:`~.links.UNKNOWN`.
        prices: of the store.
        same_region: whether the replicas are where the bucket is, and read for nothing.
    """
    model = _Model(plan, job, slowest(links))
    seconds = model.seconds()
    one, total = model.traffic(seconds)
    dollars = None
    if prices is not None:
        egress = 0.0 if same_region else prices.egress(total.down)
        dollars = prices.requests(total.requests) + egress
    return Cost(
        seconds=seconds,
        agreement_s=model.agreement_s,
        bytes_up=round(one.up),
        bytes_down=round(one.down),
        requests=dict(sorted(one.requests.items())),
        dollars=dollars,
    )


def streams(plan: Plan, job: Job) -> bool:
    """Whether contributions are sent chunk by chunk."""
    chunks = -(-job.nbytes // plan.chunk_bytes)
    sent = job.nbytes / job.put_ratio
    return plan.kind != "all-gather" or is_streamed(job.nbytes, sent, chunks, job.contributors)


def possible(plan: Plan, job: Job) -> bool:
    """Whether a job can be done so."""
    if plan.kind == "all-gather":
        return True
    several = job.contributors > 1 and job.nbytes > plan.chunk_bytes
    return several and (plan.kind == "sharded" or bool(job.reducers))


def slowest(links: Sequence[Link]) -> Link:
    """A link as slow as the slowest of each direction, and as far away as the farthest."""
    if not links:
        return UNKNOWN
    return Link(
        up=min(link.up for link in links),
        down=min(link.down for link in links),
        latency_us=max(link.latency_us for link in links),
    )


@dataclass
class _Traffic:
    up: float = 0.0
    down: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)


class _Model:
    """The paths of one plan over the slowest link."""

    def __init__(self, plan: Plan, job: Job, link: Link) -> None:
        self._plan, self._job, self._link = plan, job, link
        self._peers = job.contributors - 1
        self._put = job.nbytes / job.put_ratio
        self._sum = job.nbytes / job.sum_ratio
        self._chunks = max(1, -(-job.nbytes // plan.chunk_bytes))
        #: A whole chunk's part of the payload.
        self._part = min(1.0, plan.chunk_bytes / max(1, job.nbytes))
        self._near = slowest(job.reducers) if plan.kind == "reducers" else link
        owners = len(job.reducers) if plan.kind == "reducers" else job.contributors
        # Some owners have one chunk more than others.
        self._most, self._least = -(-self._chunks // owners), self._chunks // owners
        self._streams = streams(plan, job)

    @property
    def agreement_s(self) -> float:
        if self._peers == 0:
            return 0.0
        headers = -(-self._peers // self._plan.parallel)
        return (AGREEMENT_TRIPS + headers) * self._link.latency

    def seconds(self) -> float:
        if not self._streams:
            return self._encode_s(1) + self._gather_s()
        by = {"all-gather": self._all_s, "sharded": self._sharded_s, "reducers": self._reducers_s}
        streamed_s = by[self._plan.kind]()
        decided_s = self._up_s(self._put, self._chunks) + self.agreement_s
        return self._encode_s(1) + self._link.latency + max(streamed_s, decided_s)

    # -- all-gather ----------------------------------------------------------------------------

    @property
    def _reads(self) -> int:
        """Ranged reads of one contribution."""
        return max(1, -(-round(self._put) // self._plan.chunk_bytes))

    def _gather_s(self) -> float:
        down = self._down_s(self._peers * self._put, self._peers * self._reads)
        decode = self._decode_s(self._job.contributors)
        # What is little is read and checked as a whole, before the decision that names it.
        whole = self._peers * self._put <= KEEP_BYTES
        taken = overlapped(down, decode, 1 if whole else self._reads, self._job.apart)
        return self._up_s(self._put, 1) + self.agreement_s + taken

    # -- streamed: once the header that goes ahead is there ------------------------------------

    def _all_s(self) -> float:
        down = self._down_s(self._peers * self._put, self._peers * self._chunks)
        decode = self._decode_s(self._job.contributors)
        # What is sent last is noticed and read when nothing else is left to do.
        last = min(1.0, self._plan.parallel * self._part)
        read = 2 * self._link.latency + last * self._peers * self._put / self._link.down
        return max(
            self._first_s + overlapped(down, decode, self._chunks, self._job.apart),
            self._up_s(self._put, self._chunks) + read + last * decode,
        )

    def _sharded_s(self) -> float:
        own = min(1.0, self._most * self._part)
        cpu = self._decode_s(1 + own * self._job.contributors)
        up = self._up_s(self._put + own * self._sum, self._chunks + self._most)
        # With two, whoever owns least may have most to read.
        down = max(self._down_s(*self._sharded_down(n)) for n in (self._most, self._least))
        return max(
            self._first_s + overlapped(down, cpu, self._most, self._job.apart),
            self._up_s(self._put, self._chunks) + self._last_s(self._peers),
            up + self._take_s,
        )

    def _sharded_down(self, owned: int) -> tuple[float, int]:
        """Bytes and requests of an owner of so many chunks."""
        own = min(1.0, owned * self._part)
        nbytes = own * self._peers * self._put + (1 - own) * self._sum
        return nbytes, owned * self._peers + self._chunks - owned

    def _reducers_s(self) -> float:
        n, near, share = self._job.contributors, self._near, min(1.0, self._most * self._part)
        chunk_s = self._last_s(n)
        parallel = self._plan.parallel
        reads = carry(share * n * self._put, self._most * n, near.down, near.latency, parallel)
        writes = carry(share * self._sum, self._most, near.up, near.latency, parallel)
        return max(
            self._first_s + self._decode_s(1),
            self._up_s(self._put, self._chunks) + chunk_s,
            self._first_s + chunk_s + self._down_s(self._sum, self._chunks),
            self._first_s + reads + self._make_s + self._take_s,
            self._first_s + self._decode_s(share * n) + self._take_s,
            self._first_s + writes + self._take_s,
        )

    # -- a chunk's way -------------------------------------------------------------------------

    @property
    def _first_s(self) -> float:
        """Until the first chunk of every contribution is there, and has been noticed.

        The uploads that are under way at once share the link, and end together. Meanwhile the
        others' headers are read.
        """
        latency = self._link.latency
        together = min(1.0, self._plan.parallel * self._part) * self._put
        headers = -(-self._peers // self._plan.parallel) * latency
        return latency + max(latency + together / self._link.up, headers)

    def _last_s(self, parts: int) -> float:
        """From a chunk's last part to its sum at a replica that has waited for it."""
        near, parallel = self._near, self._plan.parallel
        nbytes = parts * self._part * self._put
        read = carry(nbytes, parts, near.down, near.latency, parallel)
        return near.latency + read + self._make_s + self._take_s

    @property
    def _make_s(self) -> float:
        """Reduce a chunk whose parts are here, and write the sum."""
        work = self._decode_s((self._job.contributors + 1) * self._part)
        return work + self._near.latency + self._part * self._sum / self._near.up

    @property
    def _take_s(self) -> float:
        """Notice a sum, and read it."""
        return 2 * self._link.latency + self._part * self._sum / self._link.down

    def _up_s(self, nbytes: float, requests: int) -> float:
        link = self._link
        return carry(nbytes, requests, link.up, link.latency, self._plan.parallel)

    def _down_s(self, nbytes: float, requests: int) -> float:
        link = self._link
        return carry(nbytes, requests, link.down, link.latency, self._plan.parallel)

    def _encode_s(self, payloads: float) -> float:
        return payloads * self._job.nbytes / self._job.encode_rate

    def _decode_s(self, payloads: float) -> float:
        return payloads * self._job.nbytes / self._job.decode_rate

    # -- what is paid for ----------------------------------------------------------------------

    def traffic(self, seconds: float) -> tuple[_Traffic, _Traffic]:
        """Of the replica with the most, and of all together with the reducers.

        For the decision, everybody writes a header (and another that goes ahead of chunks) and
        reads the others' once, one creates the commit and the rest read it. Looks are those of
        replicas that all have something to send; one that is ahead waits for the others besides.
        """
        n, peers, chunks = self._job.contributors, self._peers, self._chunks
        looks = self._looks(AGREEMENT_TRIPS) if peers else 1
        one, total = _Traffic(up=self._put), _Traffic()
        one.requests.update(create=2, list=looks, get_range=peers, get=1)
        total.requests.update(create=n + 1, list=n * looks, get_range=n * peers, get=n)
        if self._plan.kind == "all-gather":
            one.down, total.down = peers * self._put, n * peers * self._put
            reads, batches = self._reads, 0
            if self._streams:
                at_once = columns(self._plan.parallel, peers * self._part * self._put)
                reads, batches = chunks, self._looks(_OPENING_TRIPS)
                batches += -(-chunks // columns_a_look(at_once, chunks))
                one.requests.update(create=chunks + 1)
                total.requests.update(create=n * (chunks + 1))
            one.requests.update(get_range=peers * reads, list=batches)
            total.requests.update(get_range=n * peers * reads, list=n * batches)
        elif self._plan.kind == "sharded":
            one.up += min(1.0, self._most * self._part) * self._sum
            one.down = max(self._sharded_down(own)[0] for own in (self._most, self._least))
            reads, parts = self._sharded_down(self._most)[1], self._most * peers
            looks = self._chunk_looks(seconds, parts, reads - parts, one.down)
            one.requests.update(create=chunks + self._most + 1, get_range=reads, list=looks)
            total.down = peers * (self._put + self._sum)
            total.requests.update(create=(n + 1) * chunks + n, get_range=2 * peers * chunks)
            total.requests.update(list=n * looks)
        else:
            one.down, total.down = self._sum, n * self._sum  # the reducers are near the bucket
            looks = self._chunk_looks(seconds, 0, chunks, one.down)
            one.requests.update(create=chunks + 1, get_range=chunks, list=looks)
            parts = self._most * n
            listed = -(-parts // self._plan.parallel) * -(-parts // _PAGE)
            total.requests.update(create=(n + 1) * chunks + n, get_range=2 * n * chunks)
            total.requests.update(list=n * looks + len(self._job.reducers) * listed)
        return one, total

    def _looks(self, trips: int) -> int:
        """Looks for something that comes after so many answers, a look being one itself."""
        answer_s = self._link.latency
        pace = Pace(max(Pace.shortest_s, answer_s), expected_s=trips * answer_s)
        return pace.looks(trips * answer_s)

    def _chunk_looks(self, seconds: float, parts: int, sums: int, nbytes: float) -> int:
        """Looks for others' headers, and then for what they have written of chunks.

        What a look finds is read before the next one: so many sums as there are reads at once, or
        two chunks' parts. Other looks are in what reading ``nbytes`` leaves of ``seconds``.
        """
        at_once = self._plan.parallel
        found = -(-parts // max(at_once, 2 * self._peers)) + -(-sums // at_once)
        idle_s = max(0.0, seconds - self._down_s(nbytes, parts + sums))
        found += min(round(idle_s / _IDLE_LOOK_S), _IDLE_LOOKS * sums)
        return self._looks(_OPENING_TRIPS) + found
