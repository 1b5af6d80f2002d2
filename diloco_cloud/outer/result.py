"""The run's one authoritative result: final global parameters, by name, with their digest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from safetensors.torch import save

from diloco_cloud.exchange.layout import digest_tensors
from diloco_cloud.outer.state import FragmentState
from diloco_cloud.store.base import ObjectStore

RESULT = "result/"
WEIGHTS = "model.safetensors"


def global_digest(states: Sequence[FragmentState]) -> str:
    """Hex BLAKE3 over the global parameters of all fragments, in order."""
    return digest_tensors([p for state in states for p in state.parameters])


def export(
    store: ObjectStore,
    states: Sequence[FragmentState],
    files: Mapping[str, bytes],
    *,
    round_: int,
    step: int,
) -> None:
    """Write ``result/``: the weights, the trainer's files, and last the manifest.

    Several replicas may do this at once; they write the same bytes.
    """
    tensors = {
        name: parameter
        for state in states
        for name, parameter in zip(state.names, state.parameters, strict=True)
    }
    if tensors:
        store.put(RESULT + WEIGHTS, save(tensors, metadata={"format": "pt"}))
    for name, data in files.items():
        store.put(RESULT + name, data)
    manifest = {
        "digest": global_digest(states),
        "round": round_,
        "step": step,
        "files": sorted([*files, *([WEIGHTS] if tensors else [])]),
    }
    store.put(RESULT + "manifest.json", json.dumps(manifest).encode())
