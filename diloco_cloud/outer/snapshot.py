"""Snapshots of the outer state: written by one elected replica, read by whoever joins.

    state/<round>/<fragment>.<rank>.<attempt>.safetensors
    state/<round>/manifest.json             created once, last: without it there is no snapshot

``<round>`` is the number of decisions the state includes. A snapshot and the rounds after it give
the state at any later round, so a snapshot is also what lets earlier rounds be deleted. The newest
two are kept, with all rounds since the older one: a joiner is never robbed of what it is reading,
and one that finds the newest snapshot wrong has another to begin from.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from blake3 import blake3

from diloco_cloud import keys
from diloco_cloud.errors import (
    AlreadyExistsError,
    CorruptContributionError,
    CorruptError,
    DilocoError,
    NotFoundError,
)
from diloco_cloud.exchange import wire
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.outer.background import in_background
from diloco_cloud.outer.state import FragmentState
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)


MANIFEST = "manifest.json"


@dataclass(frozen=True)
class StoredFragment:
    """Where a fragment's state is, and how to know it.

    Attributes:
        object: name of the object in the snapshot's directory.
        digest: hex BLAKE3 of the object.
        parameters: hex BLAKE3 of the global parameters in it.
    """

    object: str
    digest: str
    parameters: str


@dataclass(frozen=True)
class Manifest:
    """A complete snapshot.

    Attributes:
        round, step: decisions and outer steps it includes.
        finished: ranks that had left the run.
        positions: (rank, inner steps of its data behind it).
        fragments: in order.
    """

    round: int
    step: int
    finished: tuple[int, ...]
    positions: tuple[tuple[int, int], ...]
    fragments: tuple[StoredFragment, ...]

    @property
    def directory(self) -> str:
        return keys.snapshot(self.round)


def _manifest(values: Any) -> Manifest:
    def name(value: Any) -> str:
        if "/" in wire.text(value) or not value:
            raise ValueError("not a name")
        return str(value)

    def fragment(values: Any) -> StoredFragment:
        kinds = {"object": name, "digest": wire.text, "parameters": wire.text}
        return StoredFragment(**wire.fields(values, kinds))

    kinds: Mapping[str, Callable[[Any], Any]] = {
        "round": wire.count,
        "step": wire.count,
        "finished": wire.many(wire.count),
        "positions": wire.many(wire.pair),
        "fragments": wire.many(fragment),
    }
    return Manifest(**wire.fields(values, kinds))


def snapshots(store: ObjectStore) -> list[Manifest]:
    """The complete snapshots, newest first.

    Raises:
        CorruptError: there are manifests, and none can be read.
    """
    found: list[Manifest] = []
    unreadable: CorruptContributionError | None = None
    for number in sorted(_numbers(store), reverse=True):
        key = keys.snapshot(number) + MANIFEST
        try:
            found.append(wire.parse(store.get(key), key, _manifest))
        except NotFoundError:
            continue  # Still being written, or being deleted.
        except CorruptContributionError as error:
            logger.warning("%s", error.message)
            unreadable = error
    if unreadable is not None and not found:
        raise CorruptError(unreadable.message) from None
    return found


def _numbers(store: ObjectStore) -> list[int]:
    """Rounds for which there is something that looks like a snapshot."""
    names = store.list_dirs(keys.STATE)
    return [int(name) for name in names if keys.snapshot_number(name) is not None]


def read_fragment(
    store: ObjectStore, manifest: Manifest, index: int, key: str, names: Sequence[str]
) -> FragmentState:
    """Fetch one fragment's state.

    Raises:
        NotFoundError: the snapshot has been superseded and deleted meanwhile.
        CorruptError: the bytes are not those the manifest names.
        LayoutMismatchError: the state is of another model.
    """
    stored = manifest.fragments[index]
    data = store.get(manifest.directory + stored.object)
    if blake3(data).hexdigest() != stored.digest:
        raise CorruptError(f"{manifest.directory}{stored.object} is damaged")
    return FragmentState.decode(data, key, names)


def write(
    store: ObjectStore,
    states: Sequence[FragmentState],
    *,
    round_: int,
    step: int,
    finished: Sequence[int] = (),
    positions: Sequence[tuple[int, int]] = (),
    writer: str,
) -> None:
    """Store a snapshot. Harmless if another writer was faster: the states are the same."""
    manifest = Manifest(round_, step, tuple(finished), tuple(positions), ())
    stored: list[StoredFragment] = []
    for i, state in enumerate(states):
        name, data = f"{i}.{writer}.safetensors", state.encode()
        store.put(manifest.directory + name, data)
        stored.append(StoredFragment(name, blake3(data).hexdigest(), state.digest))
    text = json.dumps({**asdict(manifest), "fragments": [asdict(one) for one in stored]})
    try:
        store.create(manifest.directory + MANIFEST, text.encode())
    except AlreadyExistsError:
        logger.info("snapshot of round %d was there already", round_)


class SnapshotWriter:
    """Writes the snapshots this replica is elected for, in the background, and tidies up.

    Args:
        store: the run's prefix.
        rank: of this replica.
        writer: this life of this replica, as it appears in keys.
        every: rounds between two snapshots.
    """

    def __init__(self, store: ObjectStore, *, rank: int, writer: str, every: int) -> None:
        self._store = store
        self._rank = rank
        self._writer = writer
        self._every = every
        self._due: tuple[Commit, int] | None = None
        self._under_way: Future[None] | None = None

    def schedule(self, commit: Commit, step: int) -> None:
        """Note that the state after ``commit`` is due, if it is and is this replica's to write.

        Contributors take turns, so that one that cannot write does not keep the others from it.
        """
        number, rest = divmod(commit.round + 1, self._every)
        if rest == 0:
            elected = commit.contributors[number % len(commit.contributors)]
            self._due = (commit, step) if elected.rank == self._rank else None

    def forget(self) -> None:
        """Drop what is due but not begun: the state it was to hold is not there."""
        self._due = None

    def write_due(self, capture: Callable[[], list[FragmentState]]) -> None:
        """Begin to write what is due; ``capture`` copies the state in the calling thread.

        Called once the outer step has been taken, which is after ``should_commit`` returned.
        """
        if self._due is None:
            return
        (commit, step), self._due = self._due, None
        self.flush()
        states = capture()

        def run() -> None:
            write(
                self._store,
                states,
                round_=commit.round + 1,
                step=step,
                finished=commit.finished,
                positions=commit.positions,
                writer=self._writer,
            )
            collect_garbage(self._store)

        self._under_way = in_background(run, "diloco-snapshot")

    def flush(self) -> None:
        """Wait for the snapshot under way. Its failure costs a later joiner time, not the run."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            try:
                under_way.result()
            except DilocoError as error:
                logger.warning("a snapshot could not be written: %s", error)


def collect_garbage(store: ObjectStore) -> None:
    """Delete what the newest two snapshots supersede: what is older than both, whole or not."""
    complete = snapshots(store)
    if len(complete) < 2:
        return
    kept = complete[1].round
    old_states = [keys.snapshot(number) for number in _numbers(store) if number < kept]
    old_rounds = [
        f"{keys.ROUNDS}{name}/"
        for name in store.list_dirs(keys.ROUNDS)
        if (number := keys.round_of(name)) is not None and number < kept
    ]
    for directory in [*old_rounds, *old_states]:
        if directory in old_states:  # Before what it names.
            store.delete(directory + MANIFEST)
        store.delete_many([info.key for info in store.list(directory)])
