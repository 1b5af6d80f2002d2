"""The run's one authoritative result: final global parameters, by name, with their digest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from safetensors.torch import save

from diloco_cloud import keys
from diloco_cloud.errors import NotFoundError
from diloco_cloud.exchange.layout import digest_tensors
from diloco_cloud.outer.state import FragmentState
from diloco_cloud.store.base import ObjectStore, check_key


def global_digest(states: Sequence[FragmentState]) -> str:
    """Hex BLAKE3 over the global parameters of all fragments, in order."""
    return digest_tensors([p for state in states for p in state.parameters])


def add_files(store: ObjectStore, files: Mapping[str, bytes]) -> None:
    """Put files beside the result that is to come; without a manifest there is no result yet.

    Raises:
        ValueError: a name is no relative path, or one that the result needs itself.
    """
    for name in files:
        if keys.RESULT + check_key(name) in (keys.MODEL, keys.RESULT_MANIFEST):
            raise ValueError(f"{name} is written by the outer loop")
    for name, data in files.items():
        store.put(keys.RESULT + name, data)


def exported_round(store: ObjectStore) -> int | None:
    """Decisions that the exported result includes; None where there is no result."""
    try:
        found = json.loads(store.get(keys.RESULT_MANIFEST)).get("round")
    except (NotFoundError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) else None


def export(store: ObjectStore, states: Sequence[FragmentState], *, round_: int, step: int) -> None:
    """Write the weights, and last the manifest, unless there is a later round's.

    Several replicas may do this at once; for one round they write the same bytes.
    """
    tensors = {
        name: parameter
        for state in states
        for name, parameter in zip(state.names, state.parameters, strict=True)
    }
    data = save(tensors, metadata={"format": "pt"}) if tensors else b""
    if (exported_round(store) or -1) > round_:
        return
    if tensors:
        store.put(keys.MODEL, data)
    files = [info.key for info in store.list(keys.RESULT) if info.key != keys.RESULT_MANIFEST]
    manifest = {
        "digest": global_digest(states),
        "round": round_,
        "step": step,
        "files": [key.removeprefix(keys.RESULT) for key in files],
    }
    store.put(keys.RESULT_MANIFEST, json.dumps(manifest).encode())
