"""Starts a run: everything that can be known to fail is found before anything is launched."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from diloco_cloud import keys
from diloco_cloud.errors import ConfigError, NotFoundError
from diloco_cloud.result import read_result
from diloco_cloud.run.executors import Executors, Given
from diloco_cloud.run.intents import Start, announce
from diloco_cloud.run.preflight import (
    check_environment,
    check_meeting_place,
    check_run_key,
    check_trainer,
)
from diloco_cloud.run.record import create_run
from diloco_cloud.run.reducers import reducers_request
from diloco_cloud.run.run import Run
from diloco_cloud.run.sides import naming, start_sides
from diloco_cloud.run.spec import RunSpec
from diloco_cloud.run.spec_checks import check_env
from diloco_cloud.run.start import LaunchRequest, build_request
from diloco_cloud.run.withdraw import withdraw
from diloco_cloud.store import open_store, probe_store
from diloco_cloud.store.opening import check_uri


def check_launch(spec: RunSpec, store_uri: str, executor: Given = None) -> Executors:
    """All checks that need no network; returns the executors.

    Args:
        spec: the run's settings.
        store_uri: where its prefix is to go.
        executor: see :func:`launch`.

    Raises:
        UsageError: a backend, the trainer, a dependency or a secret is not there, or the store's
            URI names none.
        DeniedError: the store's profile holds no credentials.
    """
    check_env(spec)
    executors = Executors(spec.backend, executor, spec.backend_args)
    several = len(spec.ranks_by_backend) > 1
    for backend in spec.ranks_by_backend:
        with naming(backend, several=several):
            executors.get(backend)
    check_uri(store_uri)
    check_meeting_place(list(spec.ranks_by_backend), store_uri)
    check_trainer(
        spec.trainer, spec.trainer_args, os.getcwd(), settings=spec.changed_trainer_settings
    )
    for backend in spec.ranks_by_backend:
        with naming(backend, several=several):
            check_environment(spec, backend, executors.get(backend))
    check_run_key(spec)
    return executors


def check_requests(spec: RunSpec, executors: Executors, run_uri: str) -> None:
    """Let the executors find out what they can, before anything is written.

    Raises:
        UsageError: a provider could not satisfy the request.
    """
    for backend, requests in build_requests(spec, run_uri).items():
        for request in requests:
            with naming(backend, several=len(spec.ranks_by_backend) > 1):
                request.check(executors.get(backend))


def build_requests(spec: RunSpec, run_uri: str) -> dict[str, list[LaunchRequest]]:
    """By backend, what its executor is asked for at a launch: replicas, and reducers if any."""
    requests = {
        backend: [build_request(spec, run_uri, backend=backend)]
        for backend in spec.ranks_by_backend
    }
    if spec.reducers:
        requests[spec.backend].append(reducers_request(spec, run_uri))
    return requests


def check_start(spec: RunSpec) -> None:
    """Check that the weights a run is to begin with are there.

    Raises:
        ConfigError: they are not.
        StoreError: they cannot be reached.
    """
    if spec.init_from is None:
        return
    fix = "Name a safetensors file, or a run that has ended well."
    if spec.init_from.endswith(f"/{keys.RESULT}"):
        run = spec.init_from.removesuffix(f"/{keys.RESULT}")
        result = read_result(open_store(run))
        if result is None or result.model is None:
            raise ConfigError(f"init_from: there is no model in {spec.init_from}", fix=fix)
        if not result.is_final:
            raise ConfigError(f"init_from: the run in {run} goes on", fix=fix)
        return
    directory, _, name = spec.init_from.rpartition("/")
    try:
        open_store(directory).head(name)
    except NotFoundError:
        raise ConfigError(f"init_from: there is no {spec.init_from}", fix=fix) from None


def launch(
    spec: RunSpec,
    store_uri: str | os.PathLike[str],
    *,
    executor: Given = None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Run:
    """Start a run and return at once; the replicas need this process no longer.

    Args:
        spec: the run's settings.
        store_uri: where the run's prefix ``<store_uri>/<run_id>/`` goes.
        executor: that of ``spec.backend``, or several by backend; default: those of the registry.
        clock: seconds since the epoch.
        sleep: waits for so many seconds.

    Raises:
        UsageError: the request can't work; nothing was started or written.
        StoreError: the store is not there, not writable or has no conditional create.
        RunExistsError: the run id is taken in that store.
        LaunchError: a backend failed; what had been started, on any of them, was cancelled, and
            what had been written was deleted, or the error says what is left.
    """
    executors = check_launch(spec, os.fspath(store_uri), executor)
    check_start(spec)
    store = open_store(os.fspath(store_uri))
    probe_store(store)
    prefix = store.child(spec.run_id)
    check_requests(spec, executors, prefix.uri)
    record = create_run(prefix, spec, created_at=clock())
    starts = [
        Start(ranks=ranks, attempt=0, backend=backend, world_size=spec.replicas, by="launch")
        for backend, ranks in spec.ranks_by_backend.items()
    ]
    given = os.fspath(store_uri)
    run = Run(prefix, record, executor=executors.made, store_uri=given, clock=clock)
    try:
        for start in starts:  # all, before any is started: whoever cancels knows where to look
            announce(prefix, start, at=clock())
        start_sides(prefix, record, executors, starts, clock=clock)
        run.start_reducers()
    except BaseException as error:  # Ctrl-C too must not leave a run behind that never began
        withdraw(prefix, record, executors, error, sleep=sleep)
        raise
    return run
