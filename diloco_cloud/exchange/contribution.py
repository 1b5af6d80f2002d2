"""The objects of a round: a fixed-size, self-describing header and raw bytes.

    8 bytes   magic
    4 bytes   length of the JSON that follows, little endian
    n bytes   JSON, padded with spaces
    payload   from ``header_size(nbytes, chunk_bytes)`` on

The header's size follows from the payload's alone, so a reader needs one ranged read for it and
knows where every chunk lies. Each chunk has an xxh3 checksum in the header; the commit names the
header by its BLAKE3 digest; so a commit pins every byte. There is no pickle anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias

import xxhash
from blake3 import blake3

from diloco_cloud.errors import CorruptContributionError
from diloco_cloud.exchange import wire

MAGIC = b"DILOCO\x01\n"
CHUNK_BYTES = 4 * 2**20
_JSON_ROOM = 2048

Kind: TypeAlias = Literal["contribution", "sum"]


@dataclass(frozen=True, kw_only=True)
class Header:
    """What an object of a round says of itself.

    Attributes:
        kind: a replica's "contribution" or a reduced shard ("sum").
        run, round, fragment: where it belongs.
        rank, attempt: who wrote it; for a sum, the shard's index and 0.
        layout: digest of names, shapes and dtypes; for a sum, digest of the commit.
        nbytes: of the payload.
        codec: how the payload is encoded; "raw" is the tensors' own bytes.
        base: digest of the global parameters the pseudo-gradient was taken against, or "".
        tokens, inner_steps: processed since this replica's last sync of the fragment.
        position: inner steps of this replica's data that are behind it once the round is merged.
        finite: False if any element is NaN or infinite.
        chunk_bytes: bytes covered by each checksum (the last chunk may be shorter).
        checksums: hex xxh3-64 of each chunk, joined.
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
    position: int = 0
    finite: bool = True
    chunk_bytes: int = CHUNK_BYTES
    checksums: str = ""

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

    def verify(self, first_chunk: int, data: memoryview, key: str) -> None:
        """Check bytes that begin at a chunk's start against their checksums.

        Raises:
            CorruptContributionError: a chunk's bytes are not the ones its writer had.
        """
        for i, start in enumerate(range(0, len(data), self.chunk_bytes)):
            at = (first_chunk + i) * 16
            if _checksum(data[start : start + self.chunk_bytes]) != self.checksums[at : at + 16]:
                raise CorruptContributionError(f"{key}: chunk {first_chunk + i} is damaged")


def chunk_size(value: Any) -> int:
    """A size of chunks in which every element is whole."""
    if wire.count(value) < 64 or value % 8:
        raise ValueError("not a chunk size")
    return int(value)


_FIELDS: Final[dict[str, Callable[[Any], Any]]] = {
    "kind": wire.one_of("contribution", "sum"),
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
    "position": wire.count,
    "finite": wire.flag,
    "chunk_bytes": chunk_size,
    "checksums": wire.text,
}


def header_size(nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Bytes before the payload of an object with ``nbytes`` of payload."""
    return -(-(_JSON_ROOM + 16 * -(-nbytes // chunk_bytes)) // 64) * 64


def checksums(views: Sequence[memoryview], chunk_bytes: int) -> str:
    """Hex xxh3-64 of each chunk of the concatenation of ``views``, joined."""
    found: list[str] = []
    hasher, room = xxhash.xxh3_64(), chunk_bytes
    for view in views:
        while len(view):
            piece, view = view[:room], view[room:]
            hasher.update(piece)
            room -= len(piece)
            if room == 0:
                found.append(hasher.hexdigest())
                hasher, room = xxhash.xxh3_64(), chunk_bytes
    if room < chunk_bytes:
        found.append(hasher.hexdigest())
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
    if header.size < end or len(header.checksums) != 16 * header.chunks:
        raise CorruptContributionError(f"{key}: header and payload sizes disagree")
    return header


def _checksum(data: memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)
