"""Reading the contributions of a round: every byte checked against what its header pins."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from diloco_cloud import keys
from diloco_cloud.errors import CorruptContributionError
from diloco_cloud.exchange.commit import Commit, Contributor
from diloco_cloud.exchange.contribution import (
    Header,
    decode,
    digest,
    encoded_size,
    header_size,
)
from diloco_cloud.exchange.layout import TensorLayout, all_finite
from diloco_cloud.exchange.signing import UNSIGNED, Signer
from diloco_cloud.store.base import ObjectInfo, ObjectStore

T = TypeVar("T")

#: Requests under way at once, per replica.
PARALLEL_READS = 8
#: What a header may make a reader allocate, whatever it says of itself.
_LONGEST_HEADER = 64 * 2**20
#: Bytes of contributions that are kept from before a decision until they are averaged.
KEEP_BYTES = 16 * 2**20  # SHARDED_FOR_TWO_FROM_BYTES is the same


@dataclass
class Payloads:
    """The contributions of one round, as this replica reads them.

    Attributes:
        own: this replica's contribution as (header, payload views); spares reading it back,
            because create-once made the stored bytes equal to these.
        signer: of the run.
        headers: those that were read already, by digest.
    """

    store: ObjectStore
    own: tuple[Header, list[memoryview]] | None = None
    signer: Signer = UNSIGNED
    headers: dict[str, Header] = field(default_factory=dict)
    _kept: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict, init=False)

    def has_room(self, commit: Commit, contributions: int) -> bool:
        """Whether so many contributions can be kept in memory."""
        return commit.nbytes * contributions <= KEEP_BYTES

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
        chunks = range(self.header(commit, one).chunks)
        with ThreadPoolExecutor(PARALLEL_READS, "diloco-read") as pool:
            found = list(pool.map(lambda chunk: self.chunk(commit, one, chunk), chunks))
        self._kept |= {(one.header, chunk): data for chunk, data in zip(chunks, found, strict=True)}
        if layout is None:
            return True
        return all(
            all_finite(data[low:high].view(segment.dtype))
            for chunk, data in zip(chunks, found, strict=True)
            for segment, low, high in layout.within(chunk * commit.chunk_bytes, len(data))
        )

    def header(self, commit: Commit, one: Contributor) -> Header:
        """The header the commit names; anything else under its key is refused.

        Raises:
            CorruptContributionError: it is another one.
            NotFoundError: it has been deleted.
        """
        if self.is_own(one):
            assert self.own is not None
            return self.own[0]
        if one.header not in self.headers:
            key = contribution_key(commit, one)
            size = header_size(commit.nbytes, commit.chunk_bytes)
            info = ObjectInfo(key, size + commit.nbytes, 0.0)
            header, name = read_header(
                self.store, info, commit.nbytes, commit.chunk_bytes, self.signer
            )
            if name != one.header:
                raise CorruptContributionError(f"{key}: not the bytes that were committed")
            self.headers[name] = header
        return self.headers[one.header]

    def chunk(self, commit: Commit, one: Contributor, chunk: int) -> torch.Tensor:
        """One chunk of a contribution: uint8, only to be read."""
        kept = self._kept.get((one.header, chunk))
        if kept is not None:
            return kept
        header = self.header(commit, one)
        start, stop = header.chunk_span(chunk)
        if self.is_own(one):
            assert self.own is not None
            return _slice(self.own[1], start, stop)
        key = contribution_key(commit, one)
        data = self.store.get_range(key, header.size + start, stop - start)
        header.verify(chunk, data, key, self.signer)
        return as_tensor(data)

    def is_own(self, one: Contributor) -> bool:
        """Whether a contribution is the one this replica has in memory."""
        return self.own is not None and (one.rank, one.attempt) == (
            self.own[0].rank,
            self.own[0].attempt,
        )


def contribution_key(commit: Commit, one: Contributor) -> str:
    """Where a committed contribution is."""
    return keys.put(commit.round, commit.fragment, one.rank, one.attempt)


def read_header(
    store: ObjectStore,
    info: ObjectInfo,
    nbytes: int,
    chunk_bytes: int,
    signer: Signer = UNSIGNED,
    *,
    own: bool = False,
) -> tuple[Header, str]:
    """Header of a round's object, and its digest.

    One read where the payload is ``nbytes`` long in chunks of ``chunk_bytes``, as is usual.

    Args:
        store: the run's prefix.
        info: the object.
        nbytes: expected length of the payload.
        chunk_bytes: expected unit of its checksums.
        signer: of the run.
        own: this rank is to have written it.

    Raises:
        CorruptContributionError: not a contribution, or not as long as it says.
        ForeignObjectError: not signed with the run's key.
        NotFoundError: gone since ``info`` was listed.
    """

    def read(size: int) -> bytes:
        if size > min(info.size, _LONGEST_HEADER):
            raise CorruptContributionError(f"{info.key}: {info.size} bytes are no contribution")
        return bytes(store.get_range(info.key, 0, size))

    data = read(min(info.size, header_size(nbytes, chunk_bytes)))
    if encoded_size(data) > len(data):
        data = read(encoded_size(data))
    header = decode(data, info.key)
    if header.size > len(data):
        data = read(header.size)
    if info.size != header.size + header.nbytes:
        raise CorruptContributionError(f"{info.key}: truncated, or longer than it says")
    header.check(signer, info.key, own=own)
    return header, digest(data[: header.size])


def ahead(
    pool: ThreadPoolExecutor,
    read: Callable[[int, T], torch.Tensor],
    chunks: range,
    sources: tuple[T, ...],
) -> Iterator[Future[torch.Tensor]]:
    """Futures of ``read(chunk, source)`` in order, keeping a bounded number under way."""
    todo = ((chunk, source) for chunk in chunks for source in sources)
    window = PARALLEL_READS + len(sources)
    under_way: list[Future[torch.Tensor]] = []
    for chunk, source in todo:
        under_way.append(pool.submit(read, chunk, source))
        if len(under_way) >= window:
            yield under_way.pop(0)
    yield from under_way


def _slice(views: list[memoryview], start: int, stop: int) -> torch.Tensor:
    """Bytes ``start:stop`` of the concatenation of ``views``; a copy only across views."""
    found: list[memoryview] = []
    at = 0
    for view in views:
        low, high = max(start - at, 0), min(stop - at, len(view))
        if low < high:
            found.append(view[low:high])
        at += len(view)
    if len(found) == 1:
        return as_tensor(found[0])
    joined = torch.empty(stop - start, dtype=torch.uint8)
    at = 0
    for view in found:
        joined[at : at + len(view)] = as_tensor(view)
        at += len(view)
    return joined


def as_tensor(data: memoryview) -> torch.Tensor:
    """``data`` as a uint8 tensor over the same memory; it is only ever read.

    torch has no read-only tensors and warns about a read-only buffer, which is what a client hands
    out; the address is passed instead, with the buffer kept alive by the array that views it.
    """
    if not data.readonly:
        return torch.frombuffer(data, dtype=torch.uint8)
    address = np.frombuffer(data, dtype=np.uint8).ctypes.data
    array = (ctypes.c_ubyte * len(data)).from_address(address)
    array.owner = data  # type: ignore[attr-defined]
    return torch.frombuffer(array, dtype=torch.uint8)
