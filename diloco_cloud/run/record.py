"""The small JSON objects of a run's prefix: written whole, read leniently where that is safe."""

from __future__ import annotations

import difflib
import json
import logging
import os
import platform
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco_cloud import __version__, keys
from diloco_cloud.errors import (
    AlreadyExistsError,
    ConfigError,
    CorruptError,
    NotFoundError,
    RunExistsError,
    RunNotFoundError,
    UsageError,
)
from diloco_cloud.executor import ReplicaHandle
from diloco_cloud.run.lives import Life, read_lives
from diloco_cloud.run.names import provider_name
from diloco_cloud.run.spec import SPEC_VERSION, RunSpec
from diloco_cloud.store import uris
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunRecord:
    """What ``run.json`` says.

    Attributes:
        spec: the run's settings.
        created_at: seconds since the epoch, by the launcher's clock.
        host: the machine it was launched from.
        directory: the working directory it was launched from; a local replica's trainer may live
            there.
        name: what executors know its replicas as; see :func:`provider_name`.
    """

    spec: RunSpec
    created_at: float
    host: str
    directory: str
    name: str


def create_run(store: ObjectStore, spec: RunSpec, *, created_at: float) -> RunRecord:
    """Write ``run.json``, once.

    Args:
        store: the run's own prefix.
        spec: the run's settings.
        created_at: seconds since the epoch.

    Raises:
        RunExistsError: the id is taken.
    """
    name = provider_name(spec.run_id, store.uri, created_at)
    record = RunRecord(spec, created_at, platform.node(), os.getcwd(), name)
    values = {
        "version": SPEC_VERSION,
        "run_id": spec.run_id,
        "name": record.name,
        "hash": spec.digest,
        "created_at": created_at,
        "package_version": __version__,
        "host": record.host,
        "directory": record.directory,
        "spec": spec.to_json(),
    }
    try:
        store.create(keys.RUN, dump(values))
    except AlreadyExistsError:
        raise RunExistsError(
            f"the run id {spec.run_id!r} is taken in {uris.store_text(parent_uri(store))}",
            fix="Choose another name, or `diloco-cloud resume` (or `down`) the one that is there.",
        ) from None
    return record


def read_run(store: ObjectStore) -> RunRecord | None:
    """What ``run.json`` says, or None where there is none.

    Raises:
        CorruptError: it is not what a launch writes, or was changed since.
        ConfigError: it was written by another version of the package.
    """
    try:
        raw = store.get(keys.RUN)
    except NotFoundError:
        return None
    values = _parse(raw)
    if values is None or "spec" not in values:
        raise CorruptError(f"{store.uri}/{keys.RUN} is not the record of a run")
    if values.get("version") != SPEC_VERSION:
        raise ConfigError(
            f"the run was written by diloco-cloud {values.get('package_version')}, "
            f"this is {__version__}",
            fix="Use the version that launched it.",
        )
    spec = RunSpec.from_json(values["spec"])
    if spec.digest != values.get("hash"):
        raise CorruptError(f"{store.uri}/{keys.RUN} was changed after the launch")
    return RunRecord(
        spec,
        float(values.get("created_at", 0.0)),
        str(values.get("host", "")),
        str(values.get("directory", "")),
        str(values.get("name", spec.run_id)),
    )


def run_not_found(store: ObjectStore, run_id: str) -> RunNotFoundError:
    """The error for an id that is not in ``store``, with the nearest id that is."""
    try:
        known = [name for name in store.list_dirs("") if name != run_id]
    except NotFoundError:
        known = []
    near = difflib.get_close_matches(run_id, known, n=1) or [
        name for name in known if name.startswith(run_id)
    ]
    fix = f"Did you mean {near[0]}?" if near else "`diloco-cloud ls` shows the runs of a store."
    return RunNotFoundError(f"no run {run_id!r} in {uris.store_text(store.uri)}", fix=fix)


@dataclass(frozen=True)
class Launched:
    """A life that an executor has started.

    Attributes:
        backend: entry-point name of the executor.
        handle: what it returned.
    """

    attempt: int
    backend: str
    handle: ReplicaHandle

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "rank": self.handle.rank,
            "attempt": self.attempt,
            "backend": self.backend,
            "backend_name": self.handle.backend_name,
            "metadata": self.handle.metadata,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Launched:
        """The inverse of :meth:`to_json`."""
        metadata = dict(values["metadata"])
        handle = ReplicaHandle(values["rank"], values["backend_name"], metadata)
        return cls(values["attempt"], values["backend"], handle)


def write_launched(store: ObjectStore, launched: Launched, *, at: float) -> None:
    """Record what the executor returned for one life of a rank."""
    key = keys.handle(launched.handle.rank, launched.attempt)
    store.create(key, dump({**launched.to_json(), "launched_at": at}))


def list_lives(store: ObjectStore) -> Mapping[Life, Mapping[str, float]]:
    """Which objects each (rank, attempt) has, and since when; see :class:`Lives`."""
    return read_lives(store).kinds


def change_size(
    store: ObjectStore, number: int, replicas: int, places: Mapping[int, str], *, at: float
) -> None:
    """Record that the run has so many replicas from now on.

    Args:
        store: the run's own prefix.
        number: one more than that of the newest change.
        replicas: ranks from 0 to one less belong to the run.
        places: the backends of those that are about to be started: whoever finds one that never was
            knows where it belongs.
        at: seconds since the epoch.

    Raises:
        UsageError: somebody else has just changed it.
    """
    values = {
        "replicas": replicas,
        "backends": {str(rank): backend for rank, backend in places.items()},
        "requested_at": at,
    }
    if not create_json(store, keys.size(number), values):
        raise UsageError(
            f"the number of replicas of {store.uri.rpartition('/')[2]} was just changed by "
            "someone else",
            fix="Look again with `diloco-cloud status`.",
        )


def read_json(store: ObjectStore, key: str) -> dict[str, Any] | None:
    """The JSON object at ``key``; None if there is none, or if it is something else."""
    try:
        raw = store.get(key)
    except NotFoundError:
        return None
    values = _parse(raw)
    if values is None:
        logger.warning("%s/%s is not a JSON object; ignored", store.uri, key)
    return values


def create_json(store: ObjectStore, key: str, values: Mapping[str, Any]) -> bool:
    """Create ``key``; False if it was there already."""
    try:
        store.create(key, dump(values))
    except AlreadyExistsError:
        return False
    return True


def dump(values: Mapping[str, Any]) -> bytes:
    """``values`` as UTF-8 JSON."""
    return json.dumps(values, sort_keys=True).encode()


def parent_uri(store: ObjectStore) -> str:
    """The store that a run's prefix lies in, as a URI."""
    return uris.parent_uri(store.uri)


def command_line(verb: str, store: ObjectStore) -> str:
    """What a user types to do something about the run whose prefix is ``store``."""
    where = shlex.quote(uris.store_text(parent_uri(store)))
    return f"diloco-cloud {verb} {uris.run_name(store.uri)} --store {where}"


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(raw)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None
