"""A replica of a launched run: everything it says, and how it ended, reaches the run's prefix."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from diloco_cloud import keys
from diloco_cloud.errors import DilocoError, UsageError
from diloco_cloud.replica.identity import Identity
from diloco_cloud.replica.logs import ReplicaLogging
from diloco_cloud.replica.outcome import Outcome
from diloco_cloud.replica.reporter import Reporter
from diloco_cloud.replica.sigterm import Sigterm, Terminated
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)

#: Seconds a terminated replica gives its reporter: little, as its process is about to be killed.
TERMINATED_JOIN_S = 1.0


def run_reported(
    store: ObjectStore,
    identity: Identity,
    train: Callable[[Reporter], Outcome],
) -> Any:
    """Train, reporting to ``store``; return the train function's result.

    Args:
        store: the run's prefix.
        identity: of this replica.
        train: trains, and tells how that ended; or raises.

    Raises:
        Terminated: SIGTERM came; the process ends soon, even if this exception is caught.
        BaseException: whatever ``train`` raises, once it is recorded.
    """
    with Sigterm() as sigterm, ReplicaLogging(store, identity.rank, identity.attempt) as logs:
        reporter = Reporter(store, identity, logs.shipper)
        reporter.start()
        try:
            outcome = sigterm.interruptible(
                lambda: train(reporter),
                last_words=lambda: _record_termination(reporter, store, identity),
            )
        except Terminated:
            reporter.close(join_s=TERMINATED_JOIN_S)
            raise
        except BaseException as error:
            _log_failure(error)
            reporter.end(Outcome.failed(error))
            raise
        logger.info("finished")
        reporter.end(outcome)
        return outcome.result


def _log_failure(error: BaseException) -> None:
    if isinstance(error, UsageError):  # the user's to mend, and where it was raised is no help
        logger.error("failed: %s", error)
    else:
        logger.error("failed", exc_info=error)


def _record_termination(reporter: Reporter, store: ObjectStore, identity: Identity) -> None:
    outcome = Outcome.terminated(cancelled=_cancelled(store, identity))
    reporter.record(outcome)
    logger.warning("terminated (SIGTERM)")


def _cancelled(store: ObjectStore, identity: Identity) -> bool:
    try:
        store.head(keys.cancel(identity.rank, identity.attempt))
    except DilocoError:
        return False
    return True
