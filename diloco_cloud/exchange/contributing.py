"""From tensors to this replica's object in a round."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from diloco_cloud import keys
from diloco_cloud.errors import (
    AlreadyExistsError,
    CorruptContributionError,
    ExchangeError,
    NotFoundError,
)
from diloco_cloud.exchange.buffers import ChunkedBytes, as_tensor
from diloco_cloud.exchange.codecs import get_codec
from diloco_cloud.exchange.codecs.base import Codec
from diloco_cloud.exchange.codecs.chunks import Chunks, encode
from diloco_cloud.exchange.codecs.feedback import Feedback
from diloco_cloud.exchange.contribution import RAW, Header, checksums, digest
from diloco_cloud.exchange.following import SHARDED_FROM_BYTES, dealt_by, first_chunk_bytes
from diloco_cloud.exchange.host import to_host
from diloco_cloud.exchange.layout import TensorLayout, all_finite, l2_norm
from diloco_cloud.exchange.links import LinkMeter
from diloco_cloud.exchange.merging import directions
from diloco_cloud.exchange.payloads import OwnPayload, is_within, read_header
from diloco_cloud.exchange.prediction import Plan
from diloco_cloud.exchange.processors import ProcessorMeter
from diloco_cloud.exchange.reduction import Destination, memory_for
from diloco_cloud.exchange.residuals import Owed, Residuals, Settlement, SettlingBytes
from diloco_cloud.exchange.signing import UNSIGNED, Signer
from diloco_cloud.exchange.upload import PARALLEL_WRITES, open_contribution, send_chunks
from diloco_cloud.exchange.work import Work
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)

#: Bytes of a chunk, and how chunks are dealt out.
Way: TypeAlias = tuple[int, dict[str, Any]]

#: Threads that encode; more would take the processor from the training.
_ENCODERS = 2


@dataclass(frozen=True)
class Packed:
    """A contribution that is ready to be sent.

    Attributes:
        own: its bytes.
        layout: of its tensors.
        tensors: on the host, in the caller's order, or their directions; :attr:`own` has views of
            them.
        in_place: the round's means may take the place of the tensors, chunk by chunk.
        is_left_over: the tensors hold what an earlier try at the round has encoded there.
    """

    own: OwnPayload
    layout: TensorLayout
    tensors: list[torch.Tensor]
    in_place: bool
    is_left_over: bool = False

    def destination(self, chunk_bytes: int | None = None) -> Destination:
        """Where the round's means go: in the place of :attr:`tensors`, or new memory.

        Args:
            chunk_bytes: of the means; None: the contribution's.
        """
        unit = self.own.header.chunk_bytes
        if self.in_place and chunk_bytes in (None, unit):
            return self.tensors, self.own.raw
        payload, into = memory_for(self.layout, chunk_bytes or unit)
        return self.layout.unpack(payload), into

    def settling(self, into: Destination, settlement: Settlement | None) -> Destination:
        """``into``, where a chunk that takes the place of the tensors' is settled before."""
        if settlement is None or into[1] is not self.own.raw:
            return into
        views = self.layout.views(self.tensors)
        return into[0], SettlingBytes(views, self.own.header.chunk_bytes, settlement)


@dataclass
class Contributing:
    """Packs and sends the contributions of one life of one rank.

    Attributes:
        store: the run's prefix.
        run, rank, attempt: whose contributions they are.
        signer: of the run.
        codec: name of the codec; "fp32" and "raw" send the tensors' own bytes.
        reduction: "all-gather", "sharded", or "auto" by what moves fewer bytes.
        merge: "mean", or "rda": directions are sent, and how long the tensors were.
        chunk_bytes: of the tensors, in one chunk; None: as planned, or by their size.
        meter: knows this replica's link, which its contributions tell of.
        processor: knows how fast it encodes and averages, likewise.
        streams_from: bytes of tensors from which an all-gather's contributions are sent chunk by
            chunk; None: where that is worth its requests.
        overwrites_from: bytes of tensors in one object whose place the means may take. Smaller ones
            are as they were after an error, unless they are sent in shards.
        residuals: what its codec has left unsent.
    """

    store: ObjectStore
    run: str
    rank: int
    attempt: int
    signer: Signer = UNSIGNED
    codec: str = RAW
    reduction: str = "auto"
    merge: str = "mean"
    chunk_bytes: int | None = None
    meter: LinkMeter | None = None
    processor: ProcessorMeter = field(default_factory=ProcessorMeter)
    streams_from: int | None = None
    overwrites_from: int = SHARDED_FROM_BYTES
    residuals: Residuals = field(default_factory=Residuals, init=False)
    #: By fragment, what way its last round went, and how long that took.
    _took: dict[int, tuple[Way, float]] = field(default_factory=dict, init=False)
    #: Of what was last encoded in its tensors' place.
    _within: Header | None = field(default=None, init=False)

    # -- packing -------------------------------------------------------------------------------

    def pack(
        self,
        round_: int,
        fragment: int,
        tensors: Sequence[torch.Tensor],
        work: Work,
        *,
        names: Sequence[str] | None = None,
        contributors: int = 2,
        reducers: int = 0,
        plan: Plan | None = None,
        averaged_plainly: Sequence[bool] | None = None,
        in_place: bool = False,
    ) -> Packed:
        """Describe and encode ``tensors``.

        Args:
            round_: the open round.
            fragment: whose tensors they are.
            tensors: any mixture of fp32, bf16, fp16 and fp64.
            work: what they stand for.
            names: of the tensors.
            contributors: replicas that the round waits for.
            reducers: volunteers that there are.
            plan: of the round, where one was decided.
            averaged_plainly: tensors that are no directions where the others are; None: none.
            in_place: large tensors' memory may be used for what is encoded, and for the means.
        """
        with self.processor.encoding(sum(tensor.nbytes for tensor in tensors)):
            host = to_host(tensors)
            norm = l2_norm(host)
            norms: tuple[float, ...] = ()
            # A norm can overflow where all elements are finite.
            finite = math.isfinite(norm) or all(map(all_finite, host))
            if self.merge == "rda":
                host, norms = directions(host, averaged_plainly or [False] * len(host))
            layout = TensorLayout.of(host, names)
            views = layout.views(host)
            size = self._chunk_bytes(layout.nbytes, plan)
            raw, codec = ChunkedBytes(views, size), self._codec
            dealt = dealt_by(
                plan,
                layout,
                size,
                reduction=self.reduction,
                codec=RAW if codec is None else self.codec,
                contributors=contributors,
                reducers=reducers,
                streams_from=self.streams_from,
            )
            in_place = in_place and self._may_overwrite(layout.nbytes, dealt)
            # Of tied weights, one would be overwritten while the other is yet to be read.
            in_place = in_place and raw.is_disjoint
            is_left_over = is_within(self._within, round_, fragment, raw, self.signer)
            encoded: list[memoryview] | None = None
            sizes: list[int] = []
            if codec is None:
                sums = checksums(views, size, self.signer)
            else:
                feedback = self._feedback(codec, fragment, layout.numel)
                chunks = Chunks(layout, size)
                # What a mean has of them is taken off what is owed: their values are needed.
                within = raw if in_place and feedback is None else None
                encoded, sizes, sums = self._encode(codec, chunks, raw, feedback, within)
        header = Header(
            kind="contribution",
            run=self.run,
            round=round_,
            fragment=fragment,
            rank=self.rank,
            attempt=self.attempt,
            layout=layout.digest,
            nbytes=layout.nbytes,
            codec=RAW if codec is None else codec.name,
            sizes=tuple(sizes),
            volunteers=reducers,
            finite=finite,
            norm=norm if math.isfinite(norm) else 0.0,
            norms=norms,
            chunk_bytes=size,
            checksums=sums,
            **dealt,
            **self._measured(),
            took_s=self._took_s(fragment, (size, dealt)),
            **vars(work),
        ).sign(self.signer)
        needed = codec is not None and codec.decay is not None
        if in_place and codec is not None and not needed:
            self._within = header
        own = OwnPayload(header, raw, encoded, needed=needed)
        return Packed(own, layout, host, in_place, is_left_over)

    def _chunk_bytes(self, nbytes: int, plan: Plan | None) -> int:
        if self.chunk_bytes is not None:
            return self.chunk_bytes
        return first_chunk_bytes(nbytes) if plan is None else plan.chunk_bytes

    def end_round(self, header: Header, took_s: float) -> None:
        """Note how many seconds a round took, if it is known; older ones count for less."""
        dealt = {"spread": header.spread, "reducers": header.reducers} if header.spread else {}
        self._took[header.fragment] = (header.chunk_bytes, dealt), took_s
        self.processor.end_round()
        if self.meter is not None:
            self.meter.end_round()

    def _took_s(self, fragment: int, way: Way) -> float:
        before, took_s = self._took.get(fragment, (way, 0.0))
        return took_s if before == way else 0.0

    def _measured(self) -> dict[str, Any]:
        """What this replica's link and processors have shown so far."""
        encode_rate, decode_rate = self.processor.rates
        found: dict[str, Any] = {"encode_rate": encode_rate, "decode_rate": decode_rate}
        link = None if self.meter is None else self.meter.link
        if link is not None:
            found |= {"up": float(link.up), "down": float(link.down), "latency": link.latency}
            found["apart"] = round(self.processor.overlap.apart, 3)
        return found

    @property
    def _codec(self) -> Codec | None:
        return None if self.codec in (RAW, "fp32") else get_codec(self.codec)

    def _may_overwrite(self, nbytes: int, dealt: Mapping[str, Any]) -> bool:
        """Whether the round's means may take the place of the tensors, chunk by chunk."""
        codec, spread = self._codec, bool(dealt)
        if not spread and nbytes < self.overwrites_from:
            return False
        if codec is None:
            return True
        # What an exact codec makes of a chunk may be the chunk's own memory. And chunks that are
        # sent one by one are averaged before it is known whether the round has this contribution.
        return not codec.exact and (codec.decay is None or not spread)

    def _feedback(self, codec: Codec, fragment: int, numel: int) -> Feedback | None:
        return None if codec.decay is None else self.residuals.of(fragment, numel, codec.decay)

    def _encode(
        self,
        codec: Codec,
        chunks: Chunks,
        raw: ChunkedBytes,
        feedback: Feedback | None,
        within: ChunkedBytes | None,
    ) -> tuple[list[memoryview], list[int], str]:
        """The chunks, or nothing of those that are in ``within`` now; their sizes and checksums."""
        sizes, sums = [0] * len(chunks), [""] * len(chunks)

        def keep(chunk: int, data: memoryview) -> memoryview:
            sizes[chunk], sums[chunk] = len(data), self.signer.checksum(data)
            there = within is not None and within.begin_with(chunk, as_tensor(data))
            return memoryview(b"") if there else data

        with ThreadPoolExecutor(_ENCODERS, "diloco-encode") as pool:
            return encode(codec, chunks, raw.read, feedback, pool, keep), sizes, "".join(sums)

    def settlement(self, packed: Packed, feedback: Feedback | None = None) -> Settlement | None:
        """What notes that a mean has this contribution; None where nothing is left unsent.

        Args:
            packed: with the tensors unchanged.
            feedback: in which it is noted; None: in this replica's.
        """
        codec, own = self._codec, packed.own
        kept = self.residuals.get(own.header.fragment)
        if codec is None or codec.decay is None or own.encoded is None or kept is None:
            return None
        chunks = Chunks(packed.layout, own.header.chunk_bytes)
        return Settlement(codec, chunks, own.raw, own.encoded, feedback or kept)

    def owed(self, packed: Packed) -> Owed:
        """What is unsent while ``packed`` is under way."""
        kept = self.residuals.get(packed.own.header.fragment)
        after = None if kept is None else kept.copy()
        settlement = self.settlement(packed, after)
        if settlement is None or after is None:
            return Owed(self.residuals.tensors(), None)
        settlement.settle_all()
        return Owed(self.residuals.tensors(), after.residual)

    # -- sending -------------------------------------------------------------------------------

    def send(
        self, packed: Packed, place: int, parallel: int = PARALLEL_WRITES
    ) -> tuple[tuple[Header, str], bool | None]:
        """Create this replica's object, or read back the one that is there.

        Args:
            packed: the contribution.
            place: of this rank among those that the round waits for.
            parallel: requests under way at once.

        Returns:
            The header that the object has, its digest, and whether its bytes are those in memory;
            None if it is no contribution of this replica's.

        A life that was killed after its PUT and restarted without a new attempt must use what it
        wrote then, since peers may have read it. In a round that was decided already, though, the
        object belongs to somebody else's past, and using it would be silent corruption.
        """
        own = packed.own
        header = own.header
        encoded = header.encode()
        body: list[Any] = [encoded]
        if packed.is_left_over:
            try:
                return self._read_back(header)
            except NotFoundError:
                raise ExchangeError(
                    f"round {header.round}'s tensors are what an earlier try has left of them",
                    fix="Keep a copy, and try again with that.",
                ) from None
        if header.spread:
            if not open_contribution(self.store, own):
                try:
                    return self._read_back(header)
                except NotFoundError:
                    raise ExchangeError(
                        f"an earlier process of replica {self.rank}'s attempt {self.attempt} began "
                        f"to send other work to round {header.round}, and never ended",
                        fix="Give a restarted replica the next DILOCO_ATTEMPT.",
                    ) from None
            send_chunks(self.store, own, place, parallel)
        else:
            body += own.views
        try:
            self.store.create(self._key(header), body)
        except AlreadyExistsError:
            return self._read_back(header)
        return (header, digest(encoded)), True

    def _key(self, header: Header) -> str:
        return keys.put(header.round, header.fragment, self.rank, self.attempt)

    def _read_back(self, header: Header) -> tuple[tuple[Header, str], bool | None]:
        key, mine = self._key(header), digest(header.encode())
        try:
            stored, name = read_header(
                self.store,
                key,
                header.size,
                size=self.store.head(key).size,
                signer=self.signer,
                own=True,
            )
            if stored.place != header.place:
                raise CorruptContributionError(f"{key}: written for another run, round or rank")
        except CorruptContributionError as error:
            # A torn write of ours, or somebody else's: either way the round goes without this
            # work, which is kept for the next.
            logger.warning("%s", error.message)
            return (header, mine), None
        if name == mine:
            return (stored, name), True
        decided = keys.commit(header.round, header.fragment)
        if any(info.key == decided for info in self.store.list(decided)):
            raise ExchangeError(
                f"round {header.round} is already decided in {self.store.uri}, with another "
                f"contribution of replica {self.rank}",
                fix="Use a fresh prefix, or give a restarted replica the next DILOCO_ATTEMPT.",
            )
        return (stored, name), False
