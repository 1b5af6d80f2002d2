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
from dataclasses import asdict, dataclass, replace
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
from diloco_cloud.exchange.background import in_background
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.history import History
from diloco_cloud.exchange.signing import UNSIGNED, Signer
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
        history: what those decisions say.
        fragments: in order.
        mac: over all the rest, where the run is signed.
    """

    round: int
    step: int
    history: History
    fragments: tuple[StoredFragment, ...]
    mac: str = ""

    @property
    def directory(self) -> str:
        return keys.snapshot(self.round)

    def encode(self) -> bytes:
        values = {
            "round": self.round,
            "step": self.step,
            "history": self.history.to_json(),
            "fragments": [asdict(one) for one in self.fragments],
            "mac": self.mac,
        }
        return json.dumps(values).encode()

    def sign(self, signer: Signer) -> Manifest:
        """The same manifest with its mac."""
        return replace(self, mac=signer.mac("manifest", [replace(self, mac="").encode()]))

    def check(self, signer: Signer, key: str) -> None:
        """Raise ``ForeignObjectError`` unless the manifest under ``key`` is the run's own."""
        signer.check("manifest", self.mac, [replace(self, mac="").encode()], key, own=False)


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
        "history": History.from_json,
        "fragments": wire.many(fragment),
        "mac": wire.text,
    }
    return Manifest(**wire.fields(values, kinds))


def snapshots(store: ObjectStore, signer: Signer = UNSIGNED) -> list[Manifest]:
    """The complete snapshots, newest first.

    Args:
        store: the run's prefix.
        signer: of the run; manifests that are not signed with its key do not count.

    Raises:
        CorruptError: there are manifests, and none can be read.
    """
    found: list[Manifest] = []
    unreadable: CorruptContributionError | None = None
    for number in sorted(_numbers(store), reverse=True):
        key = keys.snapshot(number) + MANIFEST
        try:
            manifest = wire.parse(store.get(key), key, _manifest)
            manifest.check(signer, key)
            if manifest.round != number:
                raise CorruptContributionError(f"{key} is of round {manifest.round}")
            found.append(manifest)
        except NotFoundError:
            continue  # Still being written, or being deleted.
        except CorruptContributionError as error:
            logger.warning("%s", error.message)
            unreadable = error
    if unreadable is not None and not found:
        raise CorruptError(unreadable.message, fix=unreadable.fix) from None
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
    step: int,
    history: History,
    writer: str,
    signer: Signer = UNSIGNED,
) -> None:
    """Store a snapshot. Harmless if another writer was faster: the states are the same."""
    directory = keys.snapshot(history.round)
    stored: list[StoredFragment] = []
    for i, state in enumerate(states):
        name, data = f"{i}.{writer}.safetensors", state.encode()
        store.put(directory + name, data)
        stored.append(StoredFragment(name, blake3(data).hexdigest(), state.digest))
    manifest = Manifest(history.round, step, history, tuple(stored)).sign(signer)
    try:
        store.create(directory + MANIFEST, manifest.encode())
    except AlreadyExistsError:
        logger.info("snapshot of round %d was there already", history.round)


@dataclass(frozen=True)
class _Due:
    step: int
    history: History


class SnapshotWriter:
    """Writes the snapshots this replica is elected for, in the background, and tidies up.

    The contributors of the round take turns. If the elected one dies over it, the round after asks
    the next one to look, and so on until a snapshot is there.

    Args:
        store: the run's prefix.
        rank: of this replica.
        writer: this life of this replica, as it appears in keys.
        every: rounds between two snapshots.
        signer: of the run.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        rank: int,
        writer: str,
        every: int,
        signer: Signer = UNSIGNED,
    ) -> None:
        self._store = store
        self._rank = rank
        self._writer = writer
        self._every = every
        self._signer = signer
        self._due: _Due | None = None
        self._under_way: Future[None] | None = None
        self._look: Future[bool] | None = None

    def schedule(self, commit: Commit, step: int, history: History) -> None:
        """Note that the state after ``commit`` is due, if it is and is this replica's to write.

        Args:
            commit: of a round that was applied.
            step: outer steps with it.
            history: the decisions with it.
        """
        number, late = divmod(commit.round + 1, self._every)
        elected = commit.contributors[(number + late) % len(commit.contributors)]
        mine = elected.rank == self._rank
        self._due = (
            _Due(step, history.copy()) if late == 0 and mine else self._taken_over(step, history)
        )
        if late and number and mine:
            due = number * self._every
            self._look = in_background(lambda: _is_missing(self._store, due), "diloco-snapshot")

    def _taken_over(self, step: int, history: History) -> _Due | None:
        """What this replica writes because it found that the elected one had not."""
        if self._look is None or not self._look.done():
            return None
        look, self._look = self._look, None
        missing = look.exception() is None and look.result()
        return _Due(step, history.copy()) if missing else None

    def forget(self) -> None:
        """Drop what is due but not begun: the state it was to hold is not there."""
        self._due = None

    def write_due(self, capture: Callable[[], list[FragmentState]]) -> None:
        """Begin to write what is due; ``capture`` copies the state in the calling thread.

        Called once the outer step has been taken, which is after ``should_commit`` returned.
        """
        if self._due is None:
            return
        due, self._due = self._due, None
        self.flush()
        states = capture()

        def run() -> None:
            write(
                self._store,
                states,
                step=due.step,
                history=due.history,
                writer=self._writer,
                signer=self._signer,
            )
            collect_garbage(self._store, self._signer)

        self._under_way = in_background(run, "diloco-snapshot")

    def flush(self) -> None:
        """Wait for the snapshot under way. Its failure costs a later joiner time, not the run."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            try:
                under_way.result()
            except DilocoError as error:
                logger.warning("a snapshot could not be written: %s", error)


def _is_missing(store: ObjectStore, due: int) -> bool:
    """Whether there is no whole snapshot of ``due`` decisions or more."""
    for number in _numbers(store):
        if number >= due:
            try:
                store.head(keys.snapshot(number) + MANIFEST)
                return False
            except NotFoundError:
                continue
    return True


def collect_garbage(store: ObjectStore, signer: Signer = UNSIGNED) -> None:
    """Delete what the newest two snapshots supersede: what is older than both, whole or not."""
    complete = snapshots(store, signer)
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
