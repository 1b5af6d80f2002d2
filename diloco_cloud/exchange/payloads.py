"""Reading the contributions of a round: every byte checked against what its header pins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeVar

import torch

from diloco_cloud import keys
from diloco_cloud.errors import CorruptContributionError, CorruptError
from diloco_cloud.exchange.buffers import ChunkedBytes, as_tensor
from diloco_cloud.exchange.commit import Commit, Contributor
from diloco_cloud.exchange.contribution import (
    Header,
    decode,
    digest,
    encoded_size,
    header_size,
)
from diloco_cloud.exchange.layout import TensorLayout
from diloco_cloud.exchange.means import ChunkMeans
from diloco_cloud.exchange.processors import ProcessorMeter
from diloco_cloud.exchange.signing import CHECKSUM_CHARS, UNSIGNED, Signer
from diloco_cloud.exchange.streamed import AHEAD_BYTES, KEEP_BYTES
from diloco_cloud.store.base import ObjectStore

S = TypeVar("S")
T = TypeVar("T")
U = TypeVar("U")

#: Requests under way at once, per replica, where no plan says otherwise.
PARALLEL_READS = 8
#: Bytes that are worth a request of their own.
_READ_BYTES = 4 * 2**20
_SMALLEST_READ = _READ_BYTES // 8
#: What a header may make a reader allocate, whatever it says of itself.
_LONGEST_HEADER = 64 * 2**20
#: Bytes of an encoded chunk, for each byte of its tensors, and for its beginning.
_LARGEST_GROWTH = 4
_SMALLEST_BOUND = 4096


@dataclass
class OwnPayload:
    """What this replica contributes, as it has it in memory.

    Attributes:
        header: of the contribution.
        raw: the tensors' own bytes; or each chunk begins with what is stored of it.
        encoded: the chunks as they are stored, where they are encoded; empty where ``raw`` has it.
        overwritten: chunks of ``raw`` that hold the round's mean by now.
        needed: whether ``encoded`` is, after it was sent.
        released: chunks of ``encoded`` that only the store has.
    """

    header: Header
    raw: ChunkedBytes
    encoded: list[memoryview] | None = None
    overwritten: set[int] = field(default_factory=set)
    needed: bool = True
    released: set[int] = field(default_factory=set)

    def chunk(self, chunk: int) -> torch.Tensor | None:
        """A chunk as it is stored: uint8, only to be read; None where only the store has it."""
        if self.encoded is not None:
            data = self.encoded[chunk]  # Before it is asked whether that was the chunk yet.
            if chunk in self.released:
                return None
            if data:
                return as_tensor(data)
        size = self.header.chunk_size(chunk)
        return None if chunk in self.overwritten else self.raw.read(chunk, size)

    def pieces(self, chunk: int) -> list[memoryview]:
        """The same as views of memory, before anything is overwritten."""
        if self.encoded is not None and self.encoded[chunk]:
            return [self.encoded[chunk]]
        return list(self.raw.pieces(chunk, self.header.chunk_size(chunk)))

    def release(self, chunk: int) -> None:
        """Let go of a chunk that is in the store, unless it is needed."""
        if self.encoded is not None and self.encoded[chunk] and not self.needed:
            self.released.add(chunk)
            self.encoded[chunk] = memoryview(b"")

    @property
    def views(self) -> list[memoryview]:
        """All chunks, likewise."""
        return [piece for chunk in range(self.header.chunks) for piece in self.pieces(chunk)]


@dataclass
class Payloads:
    """The contributions of one round, as this replica reads them.

    Attributes:
        own: this replica's; spares reading it back, because create-once made the stored bytes
            equal to these.
        signer: of the run.
        parallel: requests under way at once.
        processor: measures how long checking and averaging take.
        headers: those that were read already, by digest.
        opened: those of contributions whose chunks are objects of their own, and their digests, by
            rank and attempt.
        damaged: what is wrong with contributions that are for all to read, likewise.
    """

    store: ObjectStore
    own: OwnPayload | None = None
    signer: Signer = UNSIGNED
    parallel: int = PARALLEL_READS
    processor: ProcessorMeter = field(default_factory=ProcessorMeter)
    headers: dict[str, Header] = field(default_factory=dict)
    opened: dict[tuple[int, int], tuple[Header, str]] = field(default_factory=dict)
    damaged: dict[tuple[int, int], str] = field(default_factory=dict, init=False)
    _kept: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict, init=False)
    _readers: dict[tuple[int, int], Lock] = field(default_factory=dict, init=False)

    def has_room(self, headers: Iterable[Header]) -> bool:
        """Whether contributions with these headers can be kept in memory.

        What is sent chunk by chunk is too much for that.
        """
        known = list(headers)
        is_whole = not any(header.spread for header in known)
        return is_whole and sum(header.payload_bytes for header in known) <= KEEP_BYTES

    def load(self, commit: Commit, one: Contributor, layout: TensorLayout | None = None) -> bool:
        """Read and keep a contribution; whether all its values are finite.

        Args:
            commit: names it.
            one: whose it is.
            layout: of its tensors; without it, nothing is said of values.

        Raises:
            CorruptContributionError: its bytes are not the ones its writer had.
            NotFoundError: it has been deleted.
        """
        blocks = blocks_of([self.header(commit, one)])
        found = [data for block in blocks for data in self.chunks(commit, one, block)]
        self._kept |= {(one.header, chunk): data for chunk, data in enumerate(found)}
        if layout is None:
            return True
        means = ChunkMeans(commit, layout, self.processor)
        return all(means.all_finite(chunk, data) for chunk, data in enumerate(found))

    def reading(self, life: tuple[int, int]) -> Lock:
        """To be held while :attr:`opened` is looked up for a rank and attempt, and its header read.

        Whoever decides and whoever averages ahead of the decision need the same headers, and are
        two threads: what one of them is about to have is no request of the other's.
        """
        return self._readers.setdefault(life, Lock())

    def header(self, commit: Commit, one: Contributor) -> Header:
        """The header the commit names; anything else under its key is refused.

        Raises:
            CorruptContributionError: it is another one.
            NotFoundError: it has been deleted.
        """
        if self.is_own(one):
            assert self.own is not None
            return self.own.header
        if one.header not in self.headers:
            key = contribution_key(commit, one)
            guess = header_size(commit.nbytes, commit.chunk_bytes, len(commit.norms))
            header, name = read_header(self.store, key, guess, signer=self.signer)
            if name != one.header:
                raise CorruptContributionError(f"{key}: not the bytes that were committed")
            self.headers[name] = header
        header = self.headers[one.header]
        if (header.nbytes, header.chunk_bytes) != (commit.nbytes, commit.chunk_bytes):
            raise CorruptContributionError(f"replica {one.rank}'s contribution is of another size")
        return header

    def chunk(self, commit: Commit, one: Contributor, chunk: int) -> torch.Tensor:
        """One chunk of a contribution, as it is stored: uint8, only to be read."""
        kept = self._kept.get((one.header, chunk))
        if kept is None and self.is_own(one):
            assert self.own is not None
            kept = self.own.chunk(chunk)
        if kept is not None:
            return kept
        header = self.header(commit, one)
        try:
            return self._read(commit, one, header, chunk)
        except CorruptContributionError as error:
            if header.is_for_all:
                self.damaged[one.rank, one.attempt] = error.message
            raise

    def _read(self, commit: Commit, one: Contributor, header: Header, chunk: int) -> torch.Tensor:
        size = _stored_size(header, chunk)
        if header.spread:
            key = keys.part(
                commit.round, commit.fragment, chunk, header.spread, one.rank, one.attempt
            )
            data = read_range(self.store, key, 0, size)
        else:
            key = contribution_key(commit, one)
            data = read_range(self.store, key, header.size + header.chunk_start(chunk), size)
        with self.processor.decoding():
            header.verify(chunk, data, key, self.signer)
        return as_tensor(data)

    def chunks(self, commit: Commit, one: Contributor, chunks: range) -> list[torch.Tensor]:
        """Neighbouring chunks, as :meth:`chunk`; in one read where they are in one object."""
        header = self.header(commit, one)
        kept = self.is_own(one) or (one.header, chunks[0]) in self._kept
        if kept or header.spread or len(chunks) == 1:
            return [self.chunk(commit, one, chunk) for chunk in chunks]
        key = contribution_key(commit, one)
        sizes = [_stored_size(header, chunk) for chunk in chunks]
        start = header.size + header.chunk_start(chunks[0])
        data = read_range(self.store, key, start, sum(sizes))
        found = []
        for chunk, size in zip(chunks, sizes, strict=True):
            piece, data = data[:size], data[size:]
            with self.processor.decoding():
                header.verify(chunk, piece, key, self.signer)
            found.append(as_tensor(piece))
        return found

    def is_own(self, one: Contributor) -> bool:
        """Whether a contribution is the one this replica has in memory."""
        return self.own is not None and (one.rank, one.attempt) == (
            self.own.header.rank,
            self.own.header.attempt,
        )


def is_within(
    header: Header | None, round_: int, fragment: int, raw: ChunkedBytes, signer: Signer
) -> bool:
    """Whether tensors' memory has all that was encoded there of a contribution to this round."""
    if header is None or (header.round, header.fragment) != (round_, fragment):
        return False
    if header.nbytes != raw.nbytes or header.chunks != len(raw):
        return False
    pieces = (raw.read(chunk, header.chunk_size(chunk)) for chunk in range(header.chunks))
    sums = (signer.checksum(piece.numpy().data) for piece in pieces)
    places = range(0, len(header.checksums), CHECKSUM_CHARS)
    return all(map(header.checksums.startswith, sums, places))


def longest_chunk(chunk_bytes: int) -> int:
    """Bytes that a chunk of so many bytes of tensors may have as it is stored."""
    return _LARGEST_GROWTH * chunk_bytes + _SMALLEST_BOUND


def _stored_size(header: Header, chunk: int) -> int:
    """Bytes of a chunk as it is stored, if that is not beyond reason."""
    size = header.chunk_size(chunk)
    if not 0 < size <= longest_chunk(header.chunk_bytes):
        raise CorruptContributionError(f"replica {header.rank}'s chunk {chunk} has {size} bytes")
    return size


def reading_ahead(headers: Sequence[Header], parallel: int) -> tuple[list[range], int]:
    """Blocks to read contributions with these headers by, and reads that may be under way.

    Args:
        headers: of the contributions.
        parallel: requests under way at once.
    """
    window = parallel + len(headers)
    blocks = blocks_of(headers, max(AHEAD_BYTES // window, _SMALLEST_READ))
    largest = max(header.chunk_size(chunk) for header in headers for chunk in range(header.chunks))
    return blocks, max(1, min(window, AHEAD_BYTES // largest))


def blocks_of(headers: Sequence[Header], most: int = _READ_BYTES) -> list[range]:
    """Neighbouring chunks that are worth one read each.

    Args:
        headers: of the contributions that are read.
        most: bytes of one read, which may be more only where it is one chunk.
    """
    blocks: list[range] = []
    start = room = 0
    for chunk in range(headers[0].chunks):
        size = max(header.chunk_size(chunk) for header in headers)
        if chunk > start and size > room:
            blocks.append(range(start, chunk))
            start, room = chunk, 0
        room = (room or most) - size
    return [*blocks, range(start, headers[0].chunks)]


def read_range(store: ObjectStore, key: str, start: int, length: int) -> memoryview:
    """Part of an object of a round.

    Raises:
        CorruptContributionError: the object is too short.
        NotFoundError: there is none.
    """
    try:
        return store.get_range(key, start, length)
    except CorruptError as error:
        raise CorruptContributionError(f"{key}: truncated: {error.message}") from error


def contribution_key(commit: Commit, one: Contributor) -> str:
    """Where a committed contribution is."""
    return keys.put(commit.round, commit.fragment, one.rank, one.attempt)


def read_header(
    store: ObjectStore,
    key: str,
    guess: int,
    *,
    size: int | None = None,
    signer: Signer = UNSIGNED,
    own: bool = False,
) -> tuple[Header, str]:
    """Header of a round's object, and its digest.

    One read where the header is as long as is guessed.

    Args:
        store: the run's prefix.
        key: of the object.
        guess: bytes that the header is expected to have.
        size: of the object, where it is known.
        signer: of the run.
        own: this rank is to have written it.

    Raises:
        CorruptContributionError: not a contribution, or not as long as it says.
        ForeignObjectError: not signed with the run's key.
        NotFoundError: there is no such object.
    """
    most = _LONGEST_HEADER if size is None else min(size, _LONGEST_HEADER)

    def read(length: int) -> bytes:
        if length > most:
            raise CorruptContributionError(f"{key}: no contribution, or a truncated one")
        try:
            return bytes(store.get_range(key, 0, length))
        except CorruptError as error:
            raise CorruptContributionError(f"{key}: truncated: {error.message}") from error

    data = read(min(max(guess, header_size(0)), most))
    if encoded_size(data) > len(data):
        data = read(encoded_size(data))
    header = decode(data, key)
    if header.size > len(data):
        data = read(header.size)
    if size is not None and size != header.size + header.payload_bytes:
        raise CorruptContributionError(f"{key}: truncated, or longer than it says")
    header.check(signer, key, own=own)
    return header, digest(data[: header.size])


def ahead(
    pool: ThreadPoolExecutor,
    read: Callable[[S, T], U],
    blocks: Iterable[S],
    sources: tuple[T, ...],
    window: int,
) -> Iterator[Future[U]]:
    """Futures of ``read(block, source)`` in order, at most ``window`` of them under way."""
    todo = ((block, source) for block in blocks for source in sources)
    under_way: deque[Future[U]] = deque()
    for block, source in todo:
        under_way.append(pool.submit(read, block, source))
        if len(under_way) >= window:
            yield under_way.popleft()
    while under_way:
        yield under_way.popleft()
