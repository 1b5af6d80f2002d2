"""Starts a run: everything that can be known to fail is found before anything is launched."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from diloco_cloud.errors import ConfigError, NotFoundError
from diloco_cloud.executor import ChecksLaunch, PreviewsLaunch, ServerlessExecutor
from diloco_cloud.executor_registry import get_executor
from diloco_cloud.run.intents import Start, announce
from diloco_cloud.run.preflight import check_environment, check_trainer
from diloco_cloud.run.record import create_run
from diloco_cloud.run.reducers import reducers_request
from diloco_cloud.run.run import Run
from diloco_cloud.run.spec import RunSpec
from diloco_cloud.run.start import LaunchRequest, build_request, start_replicas
from diloco_cloud.store import open_store, probe_store


def check_launch(spec: RunSpec, executor: ServerlessExecutor | None = None) -> ServerlessExecutor:
    """All checks that need no network; returns the executor.

    Raises:
        UsageError: the backend, the trainer, a dependency or a secret is not there.
    """
    args = spec.backend_args.get(spec.backend, {})
    found = get_executor(spec.backend, **args) if executor is None else executor
    check_trainer(
        spec.trainer, spec.trainer_args, os.getcwd(), settings=spec.changed_trainer_settings
    )
    check_environment(spec)
    return found


def check_request(spec: RunSpec, executor: ServerlessExecutor, run_uri: str) -> None:
    """Let the executor find out what it can, before anything is written.

    Raises:
        UsageError: its provider could not satisfy the request.
    """
    for request in build_requests(spec, run_uri):
        if isinstance(executor, PreviewsLaunch):
            request.submit(executor.preview_launch)
        if isinstance(executor, ChecksLaunch):
            request.submit(executor.check_launch)


def build_requests(spec: RunSpec, run_uri: str) -> list[LaunchRequest]:
    """What the executor is asked for at a launch: replicas, and reducers if there are any."""
    replicas = build_request(spec, run_uri)
    return [replicas, reducers_request(spec, run_uri)] if spec.reducers else [replicas]


def check_start(spec: RunSpec) -> None:
    """Check that the weights a run is to begin with are there.

    Raises:
        ConfigError: they are not.
        StoreError: they cannot be reached.
    """
    if spec.init_from is None:
        return
    directory, _, name = spec.init_from.rpartition("/")
    try:
        open_store(directory).head(name)
    except NotFoundError:
        raise ConfigError(
            f"init_from: there is no {spec.init_from}",
            fix="Name a safetensors file, or a run that has ended well.",
        ) from None


def launch(
    spec: RunSpec,
    store_uri: str | os.PathLike[str],
    *,
    executor: ServerlessExecutor | None = None,
    clock: Callable[[], float] = time.time,
) -> Run:
    """Start a run and return at once; the replicas need this process no longer.

    Args:
        spec: the run's settings.
        store_uri: where the run's prefix ``<store_uri>/<run_id>/`` goes.
        executor: default: the one that ``spec.backend`` names.
        clock: seconds since the epoch.

    Raises:
        UsageError: the request can't work; nothing was started or written.
        StoreError: the store is not there, not writable or has no conditional create.
        RunExistsError: the run id is taken in that store.
        LaunchError: the backend failed; what had been started was cancelled.
    """
    found = check_launch(spec, executor)
    check_start(spec)
    store = open_store(os.fspath(store_uri))
    probe_store(store)
    prefix = store.child(spec.run_id)
    check_request(spec, found, prefix.uri)
    record = create_run(prefix, spec, created_at=clock())
    start = Start(
        ranks=range(spec.replicas),
        attempt=0,
        backend=spec.backend,
        world_size=spec.replicas,
        by="launch",
    )
    announce(prefix, start, at=clock())
    start_replicas(prefix, record, found, start, clock=clock)
    run = Run(prefix, record, executor=found, clock=clock)
    run.start_reducers()
    return run
