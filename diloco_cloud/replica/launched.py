"""A replica of a launched run: everything it says, and how it ended, reaches the run's prefix."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Final

from diloco_cloud import keys
from diloco_cloud.errors import DilocoError, RewardError, UsageError
from diloco_cloud.outer.hand_over import HandedOver
from diloco_cloud.replica.identity import Identity
from diloco_cloud.replica.lifetime import Lifetime, Notice
from diloco_cloud.replica.logs import ReplicaLogging
from diloco_cloud.replica.outcome import Outcome, mark_logged
from diloco_cloud.replica.reporter import Reporter
from diloco_cloud.replica.sigterm import EXIT_CODE
from diloco_cloud.replica.termination import Terminated, Termination
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)

#: Seconds a terminated replica gives its reporter: little, as its process is about to be killed.
TERMINATED_JOIN_S = 1.0
_CAUSES: Final = {"preempted": "SIGTERM", "timeout": "time limit"}


def run_reported(
    store: ObjectStore,
    identity: Identity,
    lifetime: Lifetime,
    train: Callable[[Reporter, Termination], Outcome],
    *,
    heartbeat_s: float,
) -> Any:
    """Train, reporting to ``store``; return the train function's result.

    Args:
        store: the run's prefix.
        identity: of this replica.
        lifetime: of this process.
        train: trains, and tells how that ended; or raises.
        heartbeat_s: seconds between two signs of life.

    Raises:
        SystemExit: it was cancelled before it began.
        Terminated: this life had to end early, and the process ends soon, even if this exception
            is caught.
        BaseException: whatever ``train`` raises, once it is recorded.
    """
    with (
        Termination(lifetime) as termination,
        ReplicaLogging(store, identity.rank, identity.attempt) as logs,
    ):
        reporter = Reporter(store, identity, logs.shipper, heartbeat_s=heartbeat_s)
        reporter.start()
        witness = _Witness(store, identity, reporter)
        if (
            witness.is_cancelled()
        ):  # While it waited for a machine, perhaps unknown to its launcher.
            reporter.end(Outcome.ended_early("preempted", cancelled=True, handed_over=False))
            raise SystemExit(EXIT_CODE)
        try:
            outcome = termination.interruptible(lambda: train(reporter, termination), witness)
        except Terminated:
            reporter.close(join_s=TERMINATED_JOIN_S)
            raise
        except HandedOver:  # the trainer's own wish, such as on a provider's spot notice
            logger.warning("handed over")
            reporter.end(Outcome.ended_early("preempted", cancelled=False, handed_over=True))
            raise
        except BaseException as error:
            _log_failure(error)
            reporter.end(Outcome.failed(error))
            raise
        logger.info("finished")
        reporter.end(outcome)
        return outcome.result


def _log_failure(error: BaseException) -> None:
    # The user's to mend, and where it was raised is no help: a reward's failure names the line.
    is_users = isinstance(error, UsageError | RewardError)
    if is_users and os.environ.get("DILOCO_DEBUG") != "1":
        logger.error("failed: %s", error)
    else:
        logger.error("failed", exc_info=error)
    mark_logged(error)


class _Witness:
    """Tells the run that this life ends early."""

    def __init__(self, store: ObjectStore, identity: Identity, reporter: Reporter) -> None:
        self._store = store
        self._identity = identity
        self._reporter = reporter

    def on_notice(self, notice: Notice) -> None:
        self._reporter.heartbeat.announce("handing over")
        left = notice.last_words_at - notice.given_at
        logger.warning("%s: %.0f s to hand over", _CAUSES[notice.cause], left)

    def last_words(self, notice: Notice, error: BaseException | None) -> None:
        handed_over, cancelled = isinstance(error, HandedOver), self.is_cancelled()
        self._reporter.record(
            Outcome.ended_early(notice.cause, cancelled=cancelled, handed_over=handed_over)
        )
        how = "handed over" if handed_over else "terminated"
        foreign = error if isinstance(error, Exception) else None
        logger.warning("%s (%s)", how, _CAUSES[notice.cause], exc_info=foreign)
        # The main thread sees to that too, when it comes to it, which may be never.
        self._reporter.ship_soon()

    def is_cancelled(self) -> bool:
        """Whether a user has asked for this life's end."""
        try:
            self._store.head(keys.cancel(self._identity.rank, self._identity.attempt))
        except DilocoError:
            return False
        return True
