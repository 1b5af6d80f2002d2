"""Writing the run's result: final global parameters, by name, with their digest.

Several replicas may write one at once, one of them very slowly, and of different rounds: a replica
that is taken for dead when the others finish may wake up and go on alone. And each may be killed
between any two requests. So no two of them write under one key, unless they write the same: a
result is a directory named by round and digest. What counts is the manifest of the latest round
(:func:`diloco_cloud.result.read_result`), which is written when all else is there.

* Killed before the manifest: what stood before counts on. What is left is used by the next life,
  or deleted after a later result.
* Of one round: weights are created once, the same bytes by whoever is first. The manifest of a
  result so far is created, that of a final one put in its place; so the first kind never replaces
  the second, in whatever order they are written.
* Of different rounds: the later one's manifest counts from its write on, whatever the slow one of
  the earlier round still writes. Deleted is only what is of an earlier round than one whose
  manifest stands, and that is never deleted before a yet later one stands. So nothing that counts
  is deleted, however long a process stands still before it deletes what it has seen. If weights go
  that a slow writer's manifest is about to name, that manifest is of an earlier round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from safetensors.torch import save

from diloco_cloud import keys
from diloco_cloud.errors import AlreadyExistsError
from diloco_cloud.exchange.layout import digest_tensors
from diloco_cloud.outer.state import FragmentState
from diloco_cloud.result import read_result
from diloco_cloud.store.base import ObjectStore, check_key


class Exported(NamedTuple):
    """How far an exported result goes; the greater of two is the better one.

    Attributes:
        round: decisions that it includes.
        final: all replicas that went on had finished.
    """

    round: int
    final: bool


def global_digest(states: Sequence[FragmentState]) -> str:
    """Hex BLAKE3 over the global parameters of all fragments, in order."""
    return digest_tensors([p for state in states for p in state.parameters])


def add_files(store: ObjectStore, files: Mapping[str, bytes]) -> None:
    """Keep files for the results that are to come, each of which gets a copy.

    Raises:
        ValueError: a name is no relative path, or one that the result needs itself.
    """
    for name in files:
        if check_key(name) in (keys.MODEL, keys.RESULT_MANIFEST):
            raise ValueError(f"{name} is written by the outer loop")
    for name, data in files.items():
        store.put(keys.RESULT_FILES + name, data)


def exported(store: ObjectStore) -> Exported | None:
    """How far the exported result goes; None where there is none."""
    found = read_result(store)
    return None if found is None else Exported(found.round, found.is_final)


def export(
    store: ObjectStore,
    states: Sequence[FragmentState],
    *,
    round_: int,
    step: int,
    final: bool = True,
) -> None:
    """Write the weights, and last the manifest, unless there is a better result.

    Several replicas may do this at once; for one round they write the same weights.

    Args:
        store: the run's prefix.
        states: global parameters, of all fragments.
        round_: decisions that they include.
        step: outer steps that they include.
        final: nobody is left who may go on.
    """
    found = exported(store)
    if found is None or found < Exported(round_, final):
        digest = global_digest(states)
        directory = keys.result(round_, digest)
        files = _copy_files(store, directory)
        tensors = _by_name(states)
        if tensors:
            files.append(keys.MODEL)
            with suppress(AlreadyExistsError):
                store.create(directory + keys.MODEL, save(tensors, metadata={"format": "pt"}))
        known = {"digest": digest, "step": step, "round": round_, "final": final}
        manifest = json.dumps({**known, "files": sorted(files)}).encode()
        if final:
            store.put(directory + keys.RESULT_MANIFEST, manifest)
        else:
            with suppress(AlreadyExistsError):
                store.create(directory + keys.RESULT_MANIFEST, manifest)
    _delete_earlier(store)


def _copy_files(store: ObjectStore, directory: str) -> list[str]:
    """Put the trainer's files into a result; their names."""
    listed = [info.key for info in store.list(keys.RESULT_FILES)]
    names = [key.removeprefix(keys.RESULT_FILES) for key in listed]
    for name in names:
        store.put(directory + name, store.get(keys.RESULT_FILES + name))
    return names


def _by_name(states: Sequence[FragmentState]) -> dict[str, torch.Tensor]:
    return {
        name: parameter
        for state in states
        for name, parameter in zip(state.names, state.parameters, strict=True)
    }


def _delete_earlier(store: ObjectStore) -> None:
    """Delete what is of an earlier round than the result that counts."""
    standing = exported(store)
    if standing is None:
        return
    rounds = {info.key: keys.result_round(info.key) for info in store.list(keys.RESULT)}
    earlier = [key for key, one in rounds.items() if one is not None and one < standing.round]
    if earlier:
        store.delete_many(earlier)
