"""The objects of a round: a fixed-size, self-describing header and raw bytes.

    8 bytes   magic
    4 bytes   length of the JSON that follows, little endian
    n bytes   JSON, padded with spaces
    payload   from ``header_size(nbytes, chunk_bytes)`` on

The header's size follows from the payload's alone, so a reader needs one ranged read for it and
knows where every chunk lies. Each chunk has a checksum in the header (xxh3, or a keyed one where
the run is signed); the commit names the header by its BLAKE3 digest; so a commit pins every byte.
There is no pickle anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from blake3 import blake3

from diloco_cloud.errors import CorruptContributionError
from diloco_cloud.exchange import wire
from diloco_cloud.exchange.signing import CHECKSUM_CHARS, UNSIGNED, Signer

MAGIC = b"DILOCO\x01\n"
CHUNK_BYTES = 4 * 2**20
_JSON_ROOM = 2048

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
        nbytes: of the payload.
        codec: how the payload is encoded; "raw" is the tensors' own bytes.
        base: digest of the global parameters the pseudo-gradient was taken against, or "".
        tokens, inner_steps: processed since this replica's work was last in a round of the
            fragment.
        carried: how many of the tokens missed an earlier round, and are added to this one.
        staleness: rounds of the fragment decided since the oldest of that work began.
        processed: tokens that this life of the replica has processed in all.
        position: inner steps of this replica's data that are behind it once the round is merged.
        note: why a shard is void.
        finite: False if any element is NaN or infinite.
        norm: L2 norm over all elements; 0 where it is not finite.
        chunk_bytes: bytes covered by each checksum (the last chunk may be shorter).
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
    codec: str = "raw"
    base: str = ""
    tokens: int = 0
    inner_steps: int = 0
    carried: int = 0
    staleness: int = 0
    processed: int = 0
    position: int = 0
    note: str = ""
    finite: bool = True
    norm: float = 0.0
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
        return header_size(self.nbytes, self.chunk_bytes)

    @property
    def chunks(self) -> int:
        """Number of chunks of the payload."""
        return -(-self.nbytes // self.chunk_bytes)

    def chunk_span(self, chunk: int) -> tuple[int, int]:
        """First and last-plus-one payload byte of a chunk."""
        start = chunk * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.nbytes)

    def encode(self) -> bytes:
        """The header's bytes, exactly :attr:`size` long."""
        text = json.dumps(asdict(self), separators=(",", ":")).encode()
        room = self.size - len(MAGIC) - 4
        if len(text) > room:
            raise ValueError(f"header of {len(text)} bytes does not fit {room}")
        return MAGIC + len(text).to_bytes(4, "little") + text.ljust(room)

    def sign(self, signer: Signer) -> Header:
        """The same header with its mac."""
        return replace(self, mac=signer.mac("header", [replace(self, mac="").encode()]))

    def check(self, signer: Signer, key: str, *, own: bool = False) -> None:
        """Raise ``ForeignObjectError`` unless the object under ``key`` is the run's own.

        Args:
            signer: of the run.
            key: of the object.
            own: this rank is to have written it.
        """
        signer.check("header", self.mac, [replace(self, mac="").encode()], key, own=own)

    def verify(
        self, first_chunk: int, data: memoryview, key: str, signer: Signer = UNSIGNED
    ) -> None:
        """Check bytes that begin at a chunk's start against their checksums.

        Raises:
            CorruptContributionError: a chunk's bytes are not the ones its writer had.
        """
        for i, start in enumerate(range(0, len(data), self.chunk_bytes)):
            at = (first_chunk + i) * CHECKSUM_CHARS
            found = signer.checksum(data[start : start + self.chunk_bytes])
            if found != self.checksums[at : at + CHECKSUM_CHARS]:
                raise CorruptContributionError(f"{key}: chunk {first_chunk + i} is damaged")


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
    "base": wire.text,
    "tokens": wire.count,
    "inner_steps": wire.count,
    "carried": wire.count,
    "staleness": wire.count,
    "processed": wire.count,
    "position": wire.count,
    "note": wire.text,
    "finite": wire.flag,
    "norm": wire.magnitude,
    "chunk_bytes": chunk_size,
    "checksums": wire.text,
    "mac": wire.text,
}


def header_size(nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Bytes before the payload of an object with ``nbytes`` of payload."""
    return -(-(_JSON_ROOM + CHECKSUM_CHARS * -(-nbytes // chunk_bytes)) // 64) * 64


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
    header = wire.parse(data[12:end], key, lambda values: Header(**wire.fields(values, _FIELDS)))
    if header.carried > header.tokens:
        raise CorruptContributionError(f"{key}: carries more tokens than it has")
    if header.size < end or len(header.checksums) != CHECKSUM_CHARS * header.chunks:
        raise CorruptContributionError(f"{key}: header and payload sizes disagree")
    return header
