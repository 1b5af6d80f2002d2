"""The program every replica runs, the same on every backend.

    REPLICA_RANK=0 python -m diloco_cloud.replica_entrypoint --rendezvous-uri s3://bucket/run \\
        --spec-hash 1f0c…

With a spec hash it is a replica of a launched run: everything else is read from the run's prefix,
and its heartbeat, logs and outcome are written there. Without one, the arguments say what to train
and nothing but the exchange touches the store.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from diloco_cloud import keys
from diloco_cloud.errors import ConfigError, DilocoError, NotFoundError
from diloco_cloud.exchange.heaps import share_heaps
from diloco_cloud.replica.identity import RENDEZVOUS_ENV, Identity, replicas_now, take_run_key
from diloco_cloud.replica.outcome import Outcome, exit_code, is_logged
from diloco_cloud.replica.trainer import accepted, load_trainer, run_trainer
from diloco_cloud.run.spec import TRAINER_SETTINGS, RunSpec

if TYPE_CHECKING:
    from diloco_cloud.outer.manager import MockManager
    from diloco_cloud.replica.reporter import Reporter
    from diloco_cloud.replica.termination import Termination
    from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)


def main(
    rendezvous_uri: str,
    world_size: int | None = None,
    trainer_module: str | None = None,
    trainer_fn: str = "train",
    trainer_kwargs: Mapping[str, Any] | None = None,
    *,
    spec_hash: str | None = None,
) -> Any:
    """Train as one replica and return what the train function returns.

    The function is called as ``train(*, manager, rank, world_size, **trainer_kwargs)``.

    Args:
        rendezvous_uri: the run's prefix.
        world_size: number of replicas; not needed where there is a ``spec_hash``.
        trainer_module: module of the train function; likewise.
        trainer_fn: name of the train function.
        trainer_kwargs: passed on to it.
        spec_hash: of the run's spec, which is then read from the prefix.

    Raises:
        MissingRankError: the rank variable (``REPLICA_RANK``) is missing (a RuntimeError).
        ConfigError: the rank is outside ``[0, world_size)`` (a ValueError), neither a spec hash
            nor a trainer is given, or the spec is another one.
        TrainerImportError: the train function cannot be imported.
    """
    os.environ[RENDEZVOUS_ENV] = rendezvous_uri
    share_heaps()
    if spec_hash is not None:
        return _run_launched(rendezvous_uri, spec_hash)
    if world_size is None or trainer_module is None:
        raise ConfigError(
            "a replica needs a spec hash, or a world size and a trainer module",
            fix="Pass --spec-hash, or --world-size and --trainer-module.",
        )
    identity = Identity.from_environ(world_size)
    train = load_trainer(trainer_module, trainer_fn)
    manager = _manager(rendezvous_uri, identity, world_size)
    return run_trainer(train, manager, identity.rank, world_size, trainer_kwargs or {})


def _run_launched(uri: str, spec_hash: str) -> Any:
    from diloco_cloud.replica.claim import claim_life
    from diloco_cloud.replica.launched import run_reported
    from diloco_cloud.replica.lifetime import Lifetime
    from diloco_cloud.store import open_store

    store = open_store(uri)
    spec = read_spec(store, spec_hash)
    n_replicas = replicas_now(spec.replicas)
    identity = claim_life(store, Identity.from_environ(n_replicas))
    lifetime = Lifetime.of_process(spec.timeout)

    def train(reporter: Reporter, termination: Termination) -> Outcome:
        logger.info("replica %d of %d, attempt %d", identity.rank, n_replicas, identity.attempt)
        key = take_run_key() if spec.signed else None
        module, _, function = spec.trainer.rpartition(":")
        trainer = load_trainer(module, function)
        manager = _manager(uri, identity, n_replicas, spec=spec, store=store, key=key)
        manager.on_round = reporter.on_round
        reporter.heartbeat.follow(manager.progress)
        termination.follow(manager)
        settings = {name: getattr(spec, name) for name in TRAINER_SETTINGS}
        kwargs = {**accepted(trainer, settings), **spec.trainer_args}
        result = run_trainer(
            trainer, manager, identity.rank, n_replicas, kwargs, check=termination.check
        )
        return Outcome.succeeded(result, manager.global_digest(), manager.current_round())

    return run_reported(store, identity, lifetime, train, heartbeat_s=spec.heartbeat)


def read_spec(store: ObjectStore, spec_hash: str) -> RunSpec:
    """The spec a launcher wrote into this prefix.

    Raises:
        ConfigError: there is none, or it is not the one this replica was launched for.
    """
    try:
        spec = RunSpec.from_json(json.loads(store.get(keys.RUN))["spec"])
    except NotFoundError:
        raise ConfigError(f"{store.uri} holds no run", fix="Check the rendezvous URI.") from None
    if spec.digest != spec_hash:
        raise ConfigError(
            f"the spec in {store.uri} is not the one this replica was launched for",
            fix="Launch the run again under a new name.",
        )
    return spec


def _manager(
    uri: str,
    identity: Identity,
    world_size: int,
    *,
    spec: RunSpec | None = None,
    store: ObjectStore | None = None,
    key: bytes | None = None,
) -> MockManager:
    from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
    from diloco_cloud.exchange.membership import Membership
    from diloco_cloud.outer.manager import MockManager
    from diloco_cloud.replica.roster import Roster
    from diloco_cloud.replica.volunteers import Volunteers
    from diloco_cloud.store import open_store

    if spec is None:
        door = ObjectStoreAllReduce(uri, identity.rank, world_size, attempt=identity.attempt)
        return MockManager(door)
    prefix = open_store(uri) if store is None else store
    membership = Membership(
        world_size,
        quorum=spec.quorum,
        grace_s=spec.grace,
        heartbeat_s=spec.heartbeat,
        roster=Roster(prefix, spec.heartbeat),
    )
    door = ObjectStoreAllReduce(
        uri,
        identity.rank,
        world_size,
        attempt=identity.attempt,
        timeout_s=spec.round_timeout,
        join_timeout_s=spec.join_timeout,
        reduction=spec.reduction,
        codec=spec.codec,
        membership=membership,
        store=prefix,
        key=key,
    )
    door.exchange.outlier_norm = spec.outlier_norm
    door.exchange.merge, door.exchange.weighting = spec.merge, spec.weighting
    if spec.reducers:
        own = prefix.child(keys.REDUCERS)
        door.exchange.reducers = Volunteers(own, identity.rank, prefix, spec.heartbeat)
    return MockManager(
        door,
        snapshot_every=spec.snapshot_every,
        init_from=spec.init_from,
        checkpoint_inner=spec.checkpoint_inner,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m diloco_cloud.replica_entrypoint")
    add = parser.add_argument
    add("--rendezvous-uri", "--rendezvous", default=os.environ.get(RENDEZVOUS_ENV))
    add("--spec-hash", default=os.environ.get("DILOCO_SPEC_HASH"))
    add("--world-size", type=int)
    add("--trainer-module")
    add("--trainer-fn", default="train")
    add("--trainer-kwargs-json", type=json.loads, default={})
    return parser


def _command() -> int:
    args = _parser().parse_args()
    if not args.rendezvous_uri:
        print(f"error: --rendezvous-uri or {RENDEZVOUS_ENV} is needed", file=sys.stderr)  # noqa: T201
        return 2
    try:
        main(
            args.rendezvous_uri,
            args.world_size,
            args.trainer_module,
            args.trainer_fn,
            args.trainer_kwargs_json,
            spec_hash=args.spec_hash,
        )
    except BaseException as error:
        if is_logged(error):
            return exit_code(error)
        if not isinstance(error, DilocoError):
            raise
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_command())
