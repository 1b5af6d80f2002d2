"""The means of a commit's chunks, as objects that all replicas read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from diloco_cloud import keys
from diloco_cloud.errors import AlreadyExistsError, CorruptContributionError, NotFoundError
from diloco_cloud.exchange.agreement import may_be_deleted
from diloco_cloud.exchange.buffers import as_tensor
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.contribution import RAW, Header, decode, encoded_size, header_size
from diloco_cloud.exchange.means import ChunkMeans
from diloco_cloud.exchange.payloads import longest_chunk, read_range
from diloco_cloud.exchange.signing import Signer
from diloco_cloud.store.base import ObjectStore

#: Characters of the reason in an object that stands for a mean that cannot be had.
_LONGEST_NOTE = 400


class NoMeanError(Exception):
    """The round has no mean, for every replica alike; the message says why."""


@dataclass
class Sums:
    """Reads and writes the means of one commit's chunks.

    If a contribution turns out to be damaged, the object of a chunk says so instead, once and for
    all, and the round has no mean.

    Attributes:
        commit: pins them: another commit's are other objects.
        means: computes them.
    """

    store: ObjectStore
    commit: Commit
    means: ChunkMeans
    signer: Signer

    @property
    def name(self) -> str:
        """Of the commit, in keys."""
        return self.commit.digest[:16]

    @cached_property
    def _names(self) -> dict[str, int]:
        """Chunks by the last part of their keys; asked for with every look."""
        return {f"{chunk:06d}": chunk for chunk in range(len(self.means))}

    def listed(self) -> dict[int, int]:
        """Size of each object that is there, by chunk."""
        directory = keys.sums(self.commit.round, self.commit.fragment, self.name)
        names = self._names
        found = {info.key.removeprefix(directory): info.size for info in self.store.list(directory)}
        return {names[name]: size for name, size in found.items() if name in names}

    def make(
        self, chunk: int, parts: Iterable[torch.Tensor], *, final: bool = True
    ) -> torch.Tensor:
        """Average a chunk and store the mean, or read what is stored already.

        Args:
            chunk: its number.
            parts: each contributor's bytes of it, in commit order.
            final: the commit is the decision; a damaged part is then told to everybody.

        Returns:
            The mean's bytes in the tensors' dtypes.

        Raises:
            NoMeanError: a part is damaged, and everybody will be told so.
            CorruptContributionError: a part is damaged.
            NotFoundError: a part has been deleted.
        """
        body, note = memoryview(b""), ""
        try:
            body = self.means.sum_body(chunk, parts)
        except (CorruptContributionError, NotFoundError) as error:
            if not final or (
                isinstance(error, NotFoundError) and may_be_deleted(self.store, self.commit.round)
            ):
                raise  # Not damaged: the others are done with the round.
            self.store.head(keys.commit(self.commit.round, self.commit.fragment))
            # Nobody can have this mean, unless it is there: whichever comes first stands.
            note = error.message[:_LONGEST_NOTE] or "damaged"
        header = self._header(chunk, body, note)
        try:
            self.store.create(self._key(chunk), [header.encode(), body])
        except AlreadyExistsError:
            # Somebody did this chunk meanwhile. What is stored is what all others read.
            return self.read(chunk, self.store.head(self._key(chunk)).size)
        if note:
            raise NoMeanError(note)
        return self.means.from_sum(chunk, as_tensor(body))

    def compute(self, chunk: int, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """What :meth:`make` returns, without storing it."""
        return self.means.from_sum(chunk, as_tensor(self.means.sum_body(chunk, parts)))

    def read(self, chunk: int, size: int) -> torch.Tensor:
        """A stored mean's bytes in the tensors' dtypes; arguments and errors as of :meth:`body`."""
        return self.means.from_sum(chunk, self.body(chunk, size))

    def body(self, chunk: int, size: int) -> torch.Tensor:
        """A stored mean as it is stored (uint8).

        Args:
            chunk: its number.
            size: of the object.

        Raises:
            NoMeanError: the object says that there is none.
            CorruptContributionError: it is no mean of this commit.
        """
        key, unit = self._key(chunk), self.commit.chunk_bytes
        if size > header_size(unit, unit) + longest_chunk(unit):
            raise CorruptContributionError(f"{key}: {size} bytes are no mean of a chunk")
        data = read_range(self.store, key, 0, size)
        header = decode(data[: encoded_size(bytes(data[:12]))], key)
        header.check(self.signer, key)
        commit = self.commit
        if header.place != (commit.run, commit.round, commit.fragment, chunk, 0):
            raise CorruptContributionError(f"{key}: another chunk's, or another round's")
        if (header.kind, header.layout) == ("void", commit.digest):
            raise NoMeanError(header.note)
        body = data[header.size :]
        if (header.kind, header.layout, header.codec, header.chunks) != (
            "sum",
            commit.digest,
            commit.sums,
            1,
        ) or not 0 < len(body) == header.payload_bytes:
            raise CorruptContributionError(f"{key}: not a mean of this round's commit")
        with self.means.processor.decoding():
            header.verify(0, body, key, self.signer)
        return as_tensor(body)

    def _key(self, chunk: int) -> str:
        return keys.sum_(self.commit.round, self.commit.fragment, self.name, chunk)

    def _header(self, chunk: int, body: memoryview, note: str) -> Header:
        encoded = self.commit.sums != RAW and not note
        return Header(
            kind="void" if note else "sum",
            run=self.commit.run,
            round=self.commit.round,
            fragment=self.commit.fragment,
            rank=chunk,
            attempt=0,
            layout=self.commit.digest,
            nbytes=0 if note else self.means.nbytes(chunk),
            codec=self.commit.sums if encoded else RAW,
            sizes=(len(body),) if encoded else (),
            note=note,
            chunk_bytes=self.commit.chunk_bytes,
            checksums="" if note else self.signer.checksum(body),
        ).sign(self.signer)
