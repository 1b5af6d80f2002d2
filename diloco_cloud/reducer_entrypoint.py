"""The program every volunteer reducer runs: the image and command of a replica, with this module.

    REPLICA_RANK=0 python -m diloco_cloud.replica_command diloco_cloud.reducer_entrypoint:main \\
        '{"rendezvous_uri":"s3://bucket/run","spec_hash":"1f0c…"}'

It averages chunks of whatever round is open, needs no accelerator, and owns nothing: a run goes on
without it. What it says of itself lies below ``reducers/`` as a replica's lies in the run's prefix,
and its end is told the same way, by the same code.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from diloco_cloud import keys
from diloco_cloud.errors import StoreError
from diloco_cloud.exchange.heaps import share_heaps
from diloco_cloud.outer.hand_over import HandedOver
from diloco_cloud.replica.claim import claim_life
from diloco_cloud.replica.identity import Identity, take_run_key
from diloco_cloud.replica.launched import run_reported
from diloco_cloud.replica.lifetime import Lifetime
from diloco_cloud.replica.outcome import Outcome
from diloco_cloud.replica.run_end import RunEnd
from diloco_cloud.replica.volunteers import Volunteers
from diloco_cloud.replica_entrypoint import read_spec
from diloco_cloud.run.spec import RunSpec
from diloco_cloud.store import open_store
from diloco_cloud.store.base import ObjectStore

if TYPE_CHECKING:
    from diloco_cloud.exchange.volunteer import Volunteer
    from diloco_cloud.replica.reporter import Reporter
    from diloco_cloud.replica.termination import Termination

logger = logging.getLogger(__name__)

#: Seconds before the next try where the store has failed beyond retrying.
_PAUSE_S = 5.0


class Shown:
    """What a reducer's sign of life tells.

    Attributes:
        volunteer: counts the rounds that it has served.
    """

    def __init__(self, volunteer: Volunteer) -> None:
        self.volunteer = volunteer

    def snapshot(self) -> dict[str, Any]:
        """As JSON values."""
        return {"state": "reducing", "round": self.volunteer.rounds}


def main(rendezvous_uri: str, spec_hash: str) -> int:
    """Serve a run's rounds until it is over; returns how many were served.

    Args:
        rendezvous_uri: the run's prefix.
        spec_hash: of the run's spec, which is read from the prefix.

    Raises:
        MissingRankError: the rank variable (``REPLICA_RANK``) is missing (a RuntimeError).
        ConfigError: the prefix holds another run, or its key is missing.
        HandedOver: nothing was heard of the replicas for long, and they may come back; the exit
            code is that of SIGTERM.
    """
    share_heaps()
    store = open_store(rendezvous_uri)
    spec = read_spec(store, spec_hash)
    own = store.child(keys.REDUCERS)
    identity = claim_life(own, Identity.from_environ(max(spec.reducers, 1)))
    lifetime = Lifetime.of_process(spec.timeout)

    def work(reporter: Reporter, _termination: Termination) -> Outcome:
        logger.info("reducer %d of %d, attempt %d", identity.rank, spec.reducers, identity.attempt)
        volunteer = _volunteer(store, rendezvous_uri, spec, identity.rank)
        reporter.heartbeat.follow(Shown(volunteer))
        end = RunEnd(store, spec)
        serve(volunteer, end, Volunteers(own, identity.rank, own, spec.heartbeat))
        if end.unheard:
            logger.warning("%s", end.why)
            raise HandedOver
        logger.info("served %d rounds; %s", volunteer.rounds, end.why)
        return Outcome.succeeded(volunteer.rounds, None)

    served: int = run_reported(own, identity, lifetime, work, heartbeat_s=spec.heartbeat)
    return served


def serve(volunteer: Volunteer, end: RunEnd, others: Volunteers) -> None:
    """Serve rounds until the end, whatever the store does meanwhile.

    Args:
        volunteer: does the work.
        end: of the run.
        others: the volunteers there are, of which this is one.
    """
    index = volunteer.index

    def over() -> bool:
        # Shards are dealt to as many as there are, so the k-th of them takes the k-th.
        volunteer.index = others.place(index)
        return end()

    while not end():
        try:
            volunteer.work(over)
        except StoreError as error:
            logger.warning("%s; trying again", error.message)
            time.sleep(_PAUSE_S)


def _volunteer(store: ObjectStore, uri: str, spec: RunSpec, index: int) -> Volunteer:
    from diloco_cloud.exchange.signing import UNSIGNED, Signer
    from diloco_cloud.exchange.volunteer import Volunteer
    from diloco_cloud.store.uris import run_name

    run = run_name(uri)
    signer = Signer(take_run_key(), run) if spec.signed else UNSIGNED
    return Volunteer(store, run, index, signer)
