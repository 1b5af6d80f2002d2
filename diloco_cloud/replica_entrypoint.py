"""The program every replica runs, the same on every backend.

    REPLICA_RANK=0 python -m diloco_cloud.replica_entrypoint --rendezvous-uri s3://bucket/run \\
        --spec-hash 1f0c…

With a spec hash it is a replica of a launched run: everything else is read from the run's prefix,
and its heartbeat, logs and outcome are written there. Without one, the arguments say what to train
and nothing but the exchange touches the store.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from diloco_cloud.errors import ConfigError, DilocoError, NotFoundError, TrainerImportError
from diloco_cloud.replica.identity import RENDEZVOUS_ENV, Identity
from diloco_cloud.run import keys
from diloco_cloud.run.spec import TRAINER_SETTINGS, RunSpec

if TYPE_CHECKING:
    from diloco_cloud.outer.manager import MockManager
    from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)


class Terminated(SystemExit):
    """SIGTERM arrived: the provider, or a user, wants this replica to end."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


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
        world_size: number of replicas; from the spec where there is a ``spec_hash``.
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
    return _train(train, manager, identity.rank, world_size, dict(trainer_kwargs or {}))


def load_trainer(module: str, function: str) -> Callable[..., Any]:
    """Import a train function.

    Raises:
        TrainerImportError: there is no such module or function, or importing it failed.
    """
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise TrainerImportError(
            f"the trainer {module}:{function} cannot be imported: {error}",
            fix="It must be importable where the replicas run.",
        ) from error
    if not callable(found):
        raise TrainerImportError(f"{module}:{function} is not a function")
    return found  # type: ignore[no-any-return]


def _train(
    train: Callable[..., Any],
    manager: MockManager,
    rank: int,
    world_size: int,
    kwargs: dict[str, Any],
) -> Any:
    """Call the train function; leave the run if it returns, and stop the manager either way."""
    finished = False
    try:
        result = train(manager=manager, rank=rank, world_size=world_size, **kwargs)
        finished = True
    finally:
        manager.shutdown(finished=finished)
    return result


def _run_launched(uri: str, spec_hash: str) -> Any:
    from diloco_cloud.replica.logs import ReplicaLogging
    from diloco_cloud.replica.reporter import Reporter
    from diloco_cloud.store import open_store

    store = open_store(uri)
    spec = read_spec(store, spec_hash)
    identity = Identity.from_environ(spec.replicas)
    with ReplicaLogging(store, identity.rank, identity.attempt) as logs:
        reporter = Reporter(store, identity, logs.shipper)
        reporter.start()
        try:
            with _sigterm_raises():
                manager, result = _train_spec(uri, store, spec, identity, reporter)
        except BaseException as error:
            _report_failure(reporter, store, identity, error)
            raise
        logger.info("finished")
        reporter.end("succeeded", result=result, digest=manager.global_digest())
        return result


def _train_spec(
    uri: str, store: ObjectStore, spec: RunSpec, identity: Identity, reporter: Any
) -> tuple[MockManager, Any]:
    module, _, function = spec.trainer.partition(":")
    train = load_trainer(module, function)
    manager = _manager(uri, identity, spec.replicas, spec=spec, store=store)
    manager.on_round = reporter.on_round
    reporter.follow(manager.progress)
    settings = {name: getattr(spec, name) for name in TRAINER_SETTINGS}
    kwargs = {**accepted(train, settings), **spec.trainer_args}
    logger.info("replica %d of %d, attempt %d", identity.rank, spec.replicas, identity.attempt)
    return manager, _train(train, manager, identity.rank, spec.replicas, kwargs)


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


def accepted(function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``settings`` that ``function`` takes by name, or all if it takes ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(settings)
    names = {p.name for p in parameters}
    return {name: value for name, value in settings.items() if name in names}


def _manager(
    uri: str,
    identity: Identity,
    world_size: int,
    *,
    spec: RunSpec | None = None,
    store: ObjectStore | None = None,
) -> MockManager:
    from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
    from diloco_cloud.outer.manager import MockManager

    if spec is None:
        door = ObjectStoreAllReduce(uri, identity.rank, world_size, attempt=identity.attempt)
        return MockManager(door)
    door = ObjectStoreAllReduce(
        uri,
        identity.rank,
        world_size,
        attempt=identity.attempt,
        timeout_s=spec.round_timeout,
        join_timeout_s=spec.join_timeout,
        reduction=spec.reduction,
        store=store,
    )
    return MockManager(door, snapshot_every=spec.snapshot_every)


def _report_failure(
    reporter: Any, store: ObjectStore, identity: Identity, error: BaseException
) -> None:
    if isinstance(error, Terminated):
        state, reason = (
            ("cancelled", "cancelled")
            if _cancelled(store, identity)
            else (
                "failed",
                "preempted",
            )
        )
        logger.warning("terminated: %s", reason)
        reporter.end(state, exit_code=128 + signal.SIGTERM, reason=reason)
        return
    logger.error("failed", exc_info=error)
    reporter.end("failed", error=error, exit_code=1, reason="exit_code")


def _cancelled(store: ObjectStore, identity: Identity) -> bool:
    try:
        store.head(keys.cancel(identity.rank, identity.attempt))
    except DilocoError:
        return False
    return True


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Turn the first SIGTERM into :class:`Terminated`, so that the end can be reported."""

    def on_sigterm(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # Signals reach the main thread only, and only it may say what they do.
        return
    previous = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


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
    except DilocoError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_command())
