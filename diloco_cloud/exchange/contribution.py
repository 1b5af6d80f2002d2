"""The objects of a round: a fixed-size, self-describing header and raw bytes.

    8 bytes   magic
    4 bytes   length of the JSON that follows, little endian
    n bytes   JSON, padded with spaces
    payload   the chunks, one after the other

The header's size follows from the size of what is averaged alone, so a reader needs one ranged read
for it and knows where every chunk lies. Each chunk has a checksum in the header (xxh3, or a keyed
one where the run is signed); the commit names the header by its BLAKE3 digest; so a commit pins
every byte. There is no pickle anywhere.

The chunks of a large contribution are objects of their own (:attr:`Header.spread`), which others
read while the rest is still on its way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from blake3 import blake3

from diloco_cloud.errors import CorruptContributionError, ForeignObjectError
from diloco_cloud.exchange import wire
from diloco_cloud.exchange.signing import CHECKSUM_CHARS, UNSIGNED, Signer
from diloco_cloud.exchange.weighting import PLAIN

MAGIC = b"DILOCO\x01\n"
CHUNK_BYTES = 4 * 2**20
#: The codec of what is not encoded.
RAW: Final = "raw"
_JSON_ROOM = 2048
#: A checksum and a size; a norm.
_CHUNK_ROOM = CHECKSUM_CHARS + 12
_NORM_ROOM = 26

Kind: TypeAlias = Literal["contribution", "sum", "void"]


@dataclass(frozen=True, kw_only=True)
class Header:
    """What an object of a round says of itself.

    Attributes:
        kind: a replica's "contribution", a reduced shard ("sum"), or the word that a shard cannot
            be had ("void").
        run, round, fragment: where it belongs.
        rank, attempt: who wrote it; for a sum, the shard's index and 0.
        layout: digest of names, shapes and dtypes; for a sum, digest of the commit.
        nbytes: of the tensors. Chunk k holds the same elements whatever the codec.
        codec: how the chunks are encoded; "raw" is the tensors' own bytes.
        sizes: bytes of each encoded chunk; empty for "raw".
        spread: 0, or into how many groups its chunks are dealt, each an object of its own: chunk k
            is in group ``k % spread``, and the payload is empty. One group is for all to read.
        reducers: volunteers that the groups are meant for; 0: for the contributors.
        volunteers: that this replica knows of, whether or not the groups are meant for them.
        base: digest of the global parameters the pseudo-gradient was taken against, or "".
        tokens, inner_steps: processed since this replica's work was last in a round of the
            fragment.
        carried: how many of the tokens missed an earlier round, and are added to this one.
        staleness: rounds of the fragment decided since the oldest of that work began.
        processed: tokens that this life of the replica has processed in all.
        position: inner steps of this replica's data that are behind it once the round is merged.
        policy_version: outer steps in the oldest policy that its rollouts came from.
        note: why a shard is void.
        finite: False if any element is NaN or infinite.
        norm: L2 norm over all elements; 0 where it is not finite.
        norms: of each tensor, where tensors are sent as directions (:mod:`.merging`).
        up, down: bytes per second that this replica has seen cross its link; 0 if unknown.
        latency: seconds of a small request; 0 if unknown.
        encode_rate, decode_rate: bytes of tensors per second that this replica has encoded, and
            added to means (:mod:`.processors`); 0 if unknown.
        took_s: seconds of this replica's last round of the fragment, waits for others in them, if
            that went the same way in chunks of the same size; 0 if not.
        apart: from 0 to 1, the part of the shorter of receiving and averaging in which the other
            stood still.
        chunk_bytes: bytes of the tensors in each chunk (the last one may be shorter).
        checksums: of each chunk, :data:`~.signing.CHECKSUM_CHARS` hex characters long, joined.
        mac: over all the rest, where the run is signed.
    """

    kind: Kind
    run: str
    round: int
    fragment: int
    rank: int
    attempt: int
    layout: str = ""
    nbytes: int = 0
    codec: str = RAW
    sizes: tuple[int, ...] = ()
    spread: int = 0
    reducers: int = 0
    volunteers: int = 0
    base: str = ""
    tokens: int = 0
    inner_steps: int = 0
    carried: int = 0
    staleness: int = 0
    processed: int = 0
    position: int = 0
    policy_version: int = 0
    note: str = ""
    finite: bool = True
    norm: float = 0.0
    norms: tuple[float, ...] = ()
    up: float = 0.0
    down: float = 0.0
    latency: float = 0.0
    encode_rate: float = 0.0
    decode_rate: float = 0.0
    apart: float = 0.0
    took_s: float = 0.0
    chunk_bytes: int = CHUNK_BYTES
    checksums: str = ""
    mac: str = ""

    @property
    def place(self) -> tuple[str, int, int, int, int]:
        """Where it belongs, which is where it must be found."""
        return self.run, self.round, self.fragment, self.rank, self.attempt

    @property
    def size(self) -> int:
        """Bytes from the object's start to its payload."""
        return header_size(self.nbytes, self.chunk_bytes, len(self.norms))

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload that is in the same object."""
        if self.spread:
            return 0
        return sum(self.sizes) if self.sizes else self.nbytes

    @property
    def is_for_all(self) -> bool:
        """Whether every contributor is to read each of its chunks, which are objects."""
        return self.spread == 1 and not self.reducers

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.nbytes // self.chunk_bytes)

    def chunk_size(self, chunk: int) -> int:
        """Bytes of a chunk as it is stored."""
        start = chunk * self.chunk_bytes
        return self.sizes[chunk] if self.sizes else min(self.chunk_bytes, self.nbytes - start)

    def chunk_start(self, chunk: int) -> int:
        """Where a chunk begins in a payload that holds all of them."""
        return sum(self.sizes[:chunk]) if self.sizes else chunk * self.chunk_bytes

    def encode(self) -> bytes:
        """The header's bytes, exactly :attr:`size` long."""
        values = {k: v for k, v in vars(self).items() if v or k not in _OPTIONAL}
        text = json.dumps(values, separators=(",", ":")).encode()
        room = self.size - len(MAGIC) - 4
        if len(text) > room:
            raise ValueError(f"header of {len(text)} bytes does not fit {room}")
        return MAGIC + len(text).to_bytes(4, "little") + text.ljust(room)

    def sign(self, signer: Signer) -> Header:
        """The same header with its mac."""
        bare = replace(self, mac="")
        return replace(bare, mac=signer.mac("header", [bare.encode()])) if signer.is_on else bare

    def check(self, signer: Signer, key: str, *, own: bool = False) -> None:
        """Raise ``ForeignObjectError`` unless the object under ``key`` is the run's own.

        Args:
            signer: of the run.
            key: of the object.
            own: this rank is to have written it.
        """
        try:
            covered = [replace(self, mac="").encode()] if signer.is_on else []
        except ValueError as error:  # It had room for its text only as somebody else wrote that.
            raise ForeignObjectError(f"{key}: {error}") from error
        signer.check("header", self.mac, covered, key, own=own)

    def verify(self, chunk: int, data: memoryview, key: str, signer: Signer = UNSIGNED) -> None:
        """Check a chunk's bytes.

        Raises:
            CorruptContributionError: they are not the ones its writer had.
        """
        at = chunk * CHECKSUM_CHARS
        if signer.checksum(data) != self.checksums[at : at + CHECKSUM_CHARS]:
            raise CorruptContributionError(f"{key}: chunk {chunk} is damaged")


def chunk_size(value: Any) -> int:
    """A size of chunks in which every element is whole."""
    if wire.count(value) < 64 or value % 8:
        raise ValueError("not a chunk size")
    return int(value)


_FIELDS: Final[dict[str, Callable[[Any], Any]]] = {
    "kind": wire.one_of("contribution", "sum", "void"),
    "run": wire.text,
    "round": wire.count,
    "fragment": wire.count,
    "rank": wire.count,
    "attempt": wire.count,
    "layout": wire.text,
    "nbytes": wire.count,
    "codec": wire.text,
    "sizes": wire.many(wire.count),
    "spread": wire.count,
    "reducers": wire.count,
    "volunteers": wire.count,
    "base": wire.text,
    "tokens": wire.count,
    "inner_steps": wire.count,
    "carried": wire.count,
    "staleness": wire.count,
    "processed": wire.count,
    "position": wire.count,
    "policy_version": wire.count,
    "note": wire.text,
    "finite": wire.flag,
    "norm": wire.magnitude,
    "norms": wire.many(wire.magnitude_or(PLAIN)),
    "up": wire.magnitude,
    "down": wire.magnitude,
    "latency": wire.magnitude,
    "encode_rate": wire.magnitude,
    "decode_rate": wire.magnitude,
    "apart": wire.magnitude,
    "took_s": wire.magnitude,
    "chunk_bytes": chunk_size,
    "checksums": wire.text,
    "mac": wire.text,
}


#: Not written where they are 0; headers of earlier versions are without them.
_OPTIONAL: Final = frozenset({"encode_rate", "decode_rate", "apart", "took_s"})


def _header(values: Any) -> Header:
    return Header(**wire.fields(values, _FIELDS, _OPTIONAL))


def header_size(nbytes: int, chunk_bytes: int = CHUNK_BYTES, norms: int = 0) -> int:
    """Bytes before the payload of an object for ``nbytes`` of tensors, of ``norms`` of them."""
    room = _JSON_ROOM + _CHUNK_ROOM * -(-nbytes // chunk_bytes) + _NORM_ROOM * norms
    return -(-room // 64) * 64


def checksums(views: Sequence[memoryview], chunk_bytes: int, signer: Signer = UNSIGNED) -> str:
    """The checksum of each chunk of the concatenation of ``views``, joined."""
    found: list[str] = []
    hasher, room = signer.hasher(), chunk_bytes
    for view in views:
        while len(view):
            piece, view = view[:room], view[room:]
            hasher.update(piece)
            room -= len(piece)
            if room == 0:
                found.append(signer.finish(hasher))
                hasher, room = signer.hasher(), chunk_bytes
    if room < chunk_bytes:
        found.append(signer.finish(hasher))
    return "".join(found)


def encoded_size(data: bytes) -> int:
    """Bytes up to the end of the header's JSON, as its first 12 bytes tell (not yet trusted)."""
    return 12 + int.from_bytes(data[8:12], "little")


def digest(header: bytes) -> str:
    """Hex BLAKE3 (256 bits) by which a commit names an object."""
    return blake3(header).hexdigest()


def decode(data: bytes | memoryview, key: str) -> Header:
    """Parse a header, trusting nothing.

    Raises:
        CorruptContributionError: not a header this version understands, or fields that contradict
            one another.
    """
    data = bytes(data)
    end = encoded_size(data)
    if data[:8] != MAGIC or end > len(data):
        raise CorruptContributionError(f"{key}: not a contribution of this version")
    header = wire.parse(data[12:end], key, _header)
    if header.carried > header.tokens:
        raise CorruptContributionError(f"{key}: carries more tokens than it has")
    if header.size < end or len(header.checksums) != CHECKSUM_CHARS * header.chunks:
        raise CorruptContributionError(f"{key}: header and payload sizes disagree")
    if len(header.sizes) != (0 if header.codec == RAW else header.chunks):
        raise CorruptContributionError(f"{key}: its chunks have no sizes, or too many")
    return header
