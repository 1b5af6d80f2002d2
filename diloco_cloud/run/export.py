"""A run whose replicas somebody else starts, such as a Kubernetes cluster.

Its record is written to the store, where the replicas find it; what starts them is the user's to
submit. They tell how they fare by the store alone.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

from diloco_cloud.errors import UsageError
from diloco_cloud.launch_request import LaunchRequest, check_launch
from diloco_cloud.run.launcher import check_start
from diloco_cloud.run.preflight import check_trainer
from diloco_cloud.run.record import create_run
from diloco_cloud.run.run import Run
from diloco_cloud.run.spec import RunSpec
from diloco_cloud.run.start import build_request
from diloco_cloud.store import open_store, probe_store
from diloco_cloud.store.opening import is_uri


def export_request(spec: RunSpec, store_uri: str) -> LaunchRequest:
    """The launch of all replicas, checked as far as that needs no network.

    The values of secrets are not needed here: they are wherever the replicas are started.

    Raises:
        UsageError: it cannot work.
    """
    if not is_uri(store_uri) or store_uri.startswith("file:"):
        raise UsageError(
            f"replicas on other machines cannot reach {store_uri}",
            fix="Add --store s3://bucket/prefix, or set DILOCO_STORE.",
        )
    if spec.reducers:
        raise UsageError(
            f"{spec.reducers} reducers cannot be exported: only replicas are",
            fix="Leave reducers out.",
        )
    check_trainer(
        spec.trainer, spec.trainer_args, os.getcwd(), settings=spec.changed_trainer_settings
    )
    request = build_request(spec, f"{store_uri.rstrip('/')}/{spec.run_id}")
    return check_launch(
        request.n_replicas,
        request.entrypoint,
        request.entrypoint_args,
        dataclasses.replace(request.options, secrets=()),
        timeout=request.timeout,
    )


def create_exported(
    spec: RunSpec, store_uri: str, *, clock: Callable[[], float] = time.time
) -> Run:
    """Write the run's record, so that replicas can be started.

    Args:
        spec: the run's settings; its backend is the name of what starts the replicas.
        store_uri: where the run's prefix goes.
        clock: seconds since the epoch.

    Raises:
        StoreError: the store is not there, not writable or has no conditional create.
        RunExistsError: the run id is taken in that store.
    """
    check_start(spec)
    store = open_store(store_uri)
    probe_store(store)
    prefix = store.child(spec.run_id)
    return Run(prefix, create_run(prefix, spec, created_at=clock()), clock=clock)
