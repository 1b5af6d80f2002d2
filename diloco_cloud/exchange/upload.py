"""Sending a large contribution: chunk by chunk, each an object of its own.

A header goes ahead of the chunks, so that others can begin to average them, and the same header as
the contribution proper (``put/``) says that all of them are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from diloco_cloud import keys
from diloco_cloud.errors import AlreadyExistsError
from diloco_cloud.exchange.contribution import digest
from diloco_cloud.exchange.payloads import OwnPayload
from diloco_cloud.store.base import ObjectStore

#: Uploads under way at once, per replica, where no plan says otherwise.
PARALLEL_WRITES = 6


def open_contribution(store: ObjectStore, own: OwnPayload) -> bool:
    """Create the header that goes ahead; whether this is the contribution that is on its way.

    It is not if an earlier process of this life had begun to send another one.
    """
    header = own.header
    encoded = header.encode()
    key = keys.opening(header.round, header.fragment, header.rank, header.attempt)
    try:
        store.create(key, encoded)
    except AlreadyExistsError:
        return digest(store.get(key)) == digest(encoded)
    return True


def send_chunks(
    store: ObjectStore, own: OwnPayload, place: int, parallel: int = PARALLEL_WRITES
) -> None:
    """Create the object of every chunk.

    Args:
        store: the run's prefix.
        own: the contribution.
        place: of this replica among those whose groups the chunks are dealt into; where the groups
            are volunteers', it is not used.
        parallel: requests under way at once.
    """
    header = own.header
    order = range(header.chunks) if header.reducers else dealt(header.chunks, header.spread, place)

    def is_averaged_here(chunk: int) -> bool:
        return header.is_for_all or (not header.reducers and chunk % header.spread == place)

    def send(chunk: int) -> None:
        key = keys.part(
            header.round, header.fragment, chunk, header.spread, header.rank, header.attempt
        )
        # A process of this life may have sent it before; the header pins what it can be.
        with suppress(AlreadyExistsError):
            store.create(key, own.pieces(chunk))
        if not is_averaged_here(chunk):
            own.release(chunk)

    with ThreadPoolExecutor(parallel, "diloco-send") as pool:
        list(pool.map(send, order))


def dealt(chunks: int, groups: int, place: int) -> Iterator[int]:
    """Chunks in the order in which the replica at ``place`` sends them.

    Those of a column (one chunk of each group) go one after the other, and every replica begins a
    column with the group after its own: so each owner is sent one chunk at a time, by another
    replica each, and can add up a column while the next one is on its way.
    """
    for column in range(0, chunks, groups):
        for step in range(1, groups + 1):
            chunk = column + (place + step) % groups
            if chunk < chunks:
                yield chunk
