"""Follows the logs of a run until its replicas have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from diloco_cloud import keys
from diloco_cloud.errors import UsageError
from diloco_cloud.executor import TERMINAL_STATES, State
from diloco_cloud.run.lives import read_lives
from diloco_cloud.run.logs import ChunkReader, LogLine, native_lines
from diloco_cloud.run.record import read_json
from diloco_cloud.store.base import ObjectStore

#: Lines of a process's own output that are shown where the prefix doesn't hold the whole story.
NATIVE_LINES = 200
#: Looks for the last lines of lives that have ended, and may have been killed before they sent
#: them.
LAST_LOOKS = 15


def read_logs(
    store: ObjectStore,
    ranks: Sequence[int],
    *,
    states: Callable[[], Sequence[State]],
    native_output: Callable[[int, int], str],
    follow: bool,
    tail: int | None,
    since: float | None,
    pause: Callable[[], None],
) -> Iterator[LogLine]:
    """The logs of ``ranks``, merged in time order; see :meth:`diloco_cloud.Run.logs`.

    Args:
        store: the run's own prefix.
        ranks: whose logs.
        states: the states of ``ranks`` now, in their order.
        native_output: the last n lines of what a rank's process wrote itself.
        follow: go on until all of ``ranks`` have ended.
        tail: begin with the last so many lines.
        since: begin at this time, in seconds since the epoch.
        pause: waits between two looks.
    """
    reader, end = ChunkReader(store, ranks), _End(store, ranks)
    # Asked before reading: what is read after the end is all there will ever be.
    now = states()
    over = not follow or end.is_reached(now)
    yield from reader.read_all(tail=tail, since=since)
    while not over:
        pause()
        now = states()
        over = end.is_reached(now)
        yield from reader.read_new()
    yield from _native(store, dict(zip(ranks, now, strict=True)), reader, native_output, tail)


class _End:
    """Tells when there is nothing more to come from replicas.

    A life records how it ended before it sends the last of its log, so that nothing can delay the
    record; and whoever cannot ask its executor knows its state by that record. Its last heartbeat
    tells that the log is complete.
    """

    def __init__(self, store: ObjectStore, ranks: Sequence[int]) -> None:
        self._store = store
        self._ranks = ranks
        self._looks_left = LAST_LOOKS

    def is_reached(self, states: Sequence[State]) -> bool:
        """Whether replicas in these states have said everything, or should have by now."""
        if not TERMINAL_STATES.issuperset(states):
            return False
        self._looks_left -= 1
        return self._looks_left < 0 or not self._is_any_speaking()

    def _is_any_speaking(self) -> bool:
        lives = read_lives(self._store)
        for rank in self._ranks:
            attempt = lives.newest(rank) or 0
            if "outcome" not in lives.of(rank, attempt):
                continue  # it was killed, and its executor says so
            beat = read_json(self._store, keys.alive(rank)) or {}
            if beat.get("attempt") == attempt and beat.get("logged") is False:
                return True
        return False


def _native(
    store: ObjectStore,
    states: dict[int, State],
    reader: ChunkReader,
    native_output: Callable[[int, int], str],
    tail: int | None,
) -> Iterator[LogLine]:
    """What processes wrote themselves, where the logs in the prefix aren't the whole story.

    That is so for a replica that never logged, and for one that died without a last word: a
    crash in native code, or out of memory.
    """
    if tail == 0:
        return
    lives = read_lives(store)
    for rank, state in states.items():
        attempt = lives.newest(rank) or 0
        logged = (rank, attempt) in reader.seen
        outcome = read_json(store, keys.outcome(rank, attempt))
        if logged and (state != "failed" or outcome is not None):
            continue
        try:
            output = native_output(rank, NATIVE_LINES if tail is None else tail)
        except UsageError:  # its executor is not installed on this machine
            output = ""
        lines = native_lines(output) if logged else output.rstrip().splitlines()
        if not lines:
            lines = str((outcome or {}).get("traceback") or "").rstrip().splitlines()
        yield from (LogLine(rank, attempt, None, line) for line in lines)
