"""Removes the record of a run that could not be launched, once nothing can be found by it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from diloco_cloud import keys
from diloco_cloud.errors import DilocoError
from diloco_cloud.run import lifecycle
from diloco_cloud.run.executors import Executors
from diloco_cloud.run.lives import read_lives
from diloco_cloud.run.record import Launched, RunRecord, command_line
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)

#: How often, and at what distance in seconds, it is asked whether cancelled replicas have ended.
_LOOKS, _PAUSE_S = 50, 0.2


def withdraw(
    store: ObjectStore,
    record: RunRecord,
    executors: Executors,
    cause: BaseException,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Delete what a launch has written that failed and was undone; never raises.

    It stays where a replica may still be going on: its record is what finds it. An error of ours
    is told the run's id, what became of it, and what to type next.

    Args:
        store: the run's own prefix.
        record: what its ``run.json`` says.
        executors: of its replicas.
        cause: why the launch failed.
        sleep: waits for so many seconds.
    """
    run_id = record.spec.run_id
    gone = False
    try:
        gone = _delete(store, executors, sleep)
    except BaseException as error:  # a second Ctrl-C, or the store that has failed the launch
        logger.debug("the record of %s stays: %s", run_id, error)
    left = f"`{command_line('down', store)}` deletes what it has written."
    said = f"Nothing of {run_id} is left." if gone else left
    if isinstance(cause, DilocoError):
        cause.message = f"{run_id} was not launched: {cause.message}"
        cause.fix = " ".join(filter(None, (cause.fix, said)))
    else:  # Ctrl-C, which no one shows
        logger.warning("%s was not launched. %s", run_id, said)


def _delete(store: ObjectStore, executors: Executors, sleep: Callable[[float], None]) -> bool:
    """Delete the prefix; False where something may be found by it, or be written to it."""
    prefixes = [store, store.child(keys.REDUCERS)]
    launched = [one for prefix in prefixes for one in lifecycle.every_launch(prefix)]
    if not _have_ended(launched, executors, sleep):
        return False
    # Last: somebody may resume the run while its replicas end.
    if not all(_is_accounted_for(prefix) for prefix in prefixes):
        return False
    lifecycle.delete(store)
    lifecycle.forget(launched, executors)
    return True


def _is_accounted_for(prefix: ObjectStore) -> bool:
    """Whether nobody has resumed the run, and every start left a handle or a word of its end."""
    lives = read_lives(prefix).kinds.items()
    return all(
        not attempt and {"handle", "outcome"} & kinds.keys() for (_, attempt), kinds in lives
    )


def _have_ended(
    launched: Sequence[Launched], executors: Executors, sleep: Callable[[float], None]
) -> bool:
    """Whether all have ended, soon enough: one that has not would write into the prefix again."""
    going = list(launched)
    for _ in range(_LOOKS):
        going = [
            one for one in going if not executors.get(one.backend).poll(one.handle).is_terminal
        ]
        if not going:
            return True
        sleep(_PAUSE_S)
    return False
