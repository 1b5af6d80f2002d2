"""Snapshots of the outer state: written by one elected replica, read by whoever joins.

    state/<round>/<fragment>.<rank>.<attempt>.safetensors
    state/<round>/manifest.json             created once, last: without it there is no snapshot

``<round>`` is the number of decisions the state includes. A snapshot and the rounds after it give
the state at any later round, so a snapshot is also what lets earlier rounds be deleted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from blake3 import blake3

from diloco_cloud.errors import AlreadyExistsError, CorruptError, DilocoError, NotFoundError
from diloco_cloud.exchange import keys
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.outer.state import FragmentState
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)

STATE = "state/"


@dataclass(frozen=True)
class StoredFragment:
    """Where a fragment's state is, and how to know it."""

    object: str
    digest: str
    parameters: str


@dataclass(frozen=True)
class Manifest:
    """A complete snapshot: decisions and outer steps it includes, and its fragments in order."""

    round: int
    step: int
    finished: tuple[int, ...]
    fragments: tuple[StoredFragment, ...]

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        values: dict[str, Any] = json.loads(data)
        fragments = tuple(StoredFragment(**f) for f in values["fragments"])
        return cls(values["round"], values["step"], tuple(values["finished"]), fragments)


def manifest_key(round_: int) -> str:
    return f"{STATE}{round_:08d}/manifest.json"


def newest(store: ObjectStore) -> Manifest | None:
    """The latest complete snapshot, or None."""
    for name in sorted(store.list_dirs(STATE), reverse=True):
        try:
            return Manifest.decode(store.get(manifest_key(int(name))))
        except (NotFoundError, ValueError):
            continue  # Still being written, or not a snapshot.
    return None


def read_fragment(
    store: ObjectStore, stored: StoredFragment, key: str, names: Sequence[str]
) -> FragmentState:
    """Fetch one fragment's state.

    Raises:
        NotFoundError: the snapshot has been superseded and deleted meanwhile.
        CorruptError: the bytes are not those the manifest names.
        LayoutMismatchError: the state is of another model.
    """
    data = store.get(stored.object)
    if blake3(data).hexdigest() != stored.digest:
        raise CorruptError(f"{stored.object} is damaged")
    return FragmentState.decode(data, key, names)


def write(
    store: ObjectStore,
    states: Sequence[FragmentState],
    *,
    round_: int,
    step: int,
    finished: Sequence[int],
    writer: str,
) -> None:
    """Store a snapshot. Harmless if another writer was faster: the states are the same."""
    stored: list[StoredFragment] = []
    for i, state in enumerate(states):
        key = f"{STATE}{round_:08d}/{i}.{writer}.safetensors"
        data = state.encode()
        store.put(key, data)
        stored.append(StoredFragment(key, blake3(data).hexdigest(), state.digest))
    manifest = Manifest(round_, step, tuple(finished), tuple(stored))
    try:
        store.create(manifest_key(round_), json.dumps(asdict(manifest)).encode())
    except AlreadyExistsError:
        logger.info("snapshot of round %d was there already", round_)


class SnapshotWriter:
    """Writes the snapshots this replica is elected for, in the background, and tidies up.

    Args:
        store: the run's prefix.
        rank, attempt: of this replica.
        every: rounds between two snapshots.
    """

    def __init__(self, store: ObjectStore, *, rank: int, attempt: int, every: int) -> None:
        self._store = store
        self._rank = rank
        self._writer = f"{rank:04d}.{attempt:04d}"
        self._every = every
        self._due: tuple[int, int, tuple[int, ...]] | None = None
        self._under_way: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "diloco-snapshot")

    def schedule(self, commit: Commit, step: int) -> None:
        """Note that the state after ``commit`` is due, if it is and is this replica's to write."""
        if (commit.round + 1) % self._every == 0 and commit.snapshot_writer == self._rank:
            self._due = (commit.round + 1, step, commit.finished)

    def write_due(self, capture: Callable[[], list[FragmentState]]) -> None:
        """Begin to write what is due; ``capture`` copies the state in the calling thread.

        Called once the outer step has been taken, which is after ``should_commit`` returned.
        """
        if self._due is None:
            return
        (round_, step, finished), self._due = self._due, None
        self.flush()
        states = capture()

        def run() -> None:
            write(
                self._store,
                states,
                round_=round_,
                step=step,
                finished=finished,
                writer=self._writer,
            )
            collect_garbage(self._store, round_)

        self._under_way = self._thread.submit(run)

    def flush(self) -> None:
        """Wait for the snapshot under way. Its failure costs a later joiner time, not the run."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            try:
                under_way.result()
            except DilocoError as error:
                logger.warning("a snapshot could not be written: %s", error)

    def close(self) -> None:
        """Finish what is under way and stop."""
        self.flush()
        self._thread.shutdown()


def collect_garbage(store: ObjectStore, round_: int) -> None:
    """Delete what the snapshot of ``round_`` decisions supersedes.

    The last decided round stays, because peers may still be reading it; everyone who contributed
    to it has read those before. The previous snapshot stays for a joiner that is reading it.
    """
    old_rounds = [
        name
        for name in store.list_dirs(keys.ROUNDS)
        if (place := keys.parse_directory(name)) is not None and place[0] < round_ - 1
    ]
    snapshots = sorted(name for name in store.list_dirs(STATE) if name.isdigit())
    old_states = [name for name in snapshots if int(name) < round_][:-1]
    doomed = [f"{keys.ROUNDS}{name}/" for name in old_rounds]
    # The manifest sorts after the data; delete it first, so that no snapshot looks whole but isn't.
    for directory in [*doomed, *(f"{STATE}{name}/" for name in old_states)]:
        store.delete_many([info.key for info in reversed(store.list(directory))])
