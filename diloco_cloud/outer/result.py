"""The run's one authoritative result: final global parameters, by name, with their digest.

Several replicas may write it at once, one of them very slowly, and of different rounds: a replica
that is taken for dead when the others finish may wake up and go on alone. So nothing is
overwritten. Both objects are created only where there are none, which a store decides between any
number of writers, and what is of an earlier round is deleted first, manifest before model. An
upload that took long then finds a later round's in its place, and is refused. Who has written looks
again, and puts right what another has deleted that was about to replace what was there before.

What remains is a process that is stopped between seeing an earlier round's result and deleting it,
while another replaces it and ends: it then deletes what is new. No store deletes on a condition.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from safetensors.torch import save

from diloco_cloud import keys
from diloco_cloud.errors import AlreadyExistsError, CorruptError, ExchangeError, NotFoundError
from diloco_cloud.exchange.layout import digest_tensors
from diloco_cloud.outer.state import FragmentState
from diloco_cloud.store.base import ObjectStore, check_key

#: Steps that are taken until it is written, and seconds before one that another has frustrated.
_TRIES: Final = 20
_PAUSE_S: Final = 0.25
#: Of a model that does not tell its round: it was written by an earlier version, or is damaged.
_UNTOLD: Final = -1
#: Bytes before the header of a safetensors file, which are its length; and more than any needs.
_LENGTH_BYTES, _MOST_HEADER_BYTES = 8, 2**27


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
    """Put files beside the result that is to come; without a manifest there is no result yet.

    Raises:
        ValueError: a name is no relative path, or one that the result needs itself.
    """
    for name in files:
        if keys.RESULT + check_key(name) in (keys.MODEL, keys.RESULT_MANIFEST):
            raise ValueError(f"{name} is written by the outer loop")
    for name, data in files.items():
        store.put(keys.RESULT + name, data)


def exported(store: ObjectStore) -> Exported | None:
    """How far the exported result goes; None where there is none."""
    try:
        manifest = json.loads(store.get(keys.RESULT_MANIFEST))
        found = manifest.get("round")
    except (NotFoundError, ValueError, AttributeError):
        return None
    if not isinstance(found, int):
        return None
    return Exported(found, final=manifest.get("final") is not False)


def export(
    store: ObjectStore,
    states: Sequence[FragmentState],
    *,
    round_: int,
    step: int,
    final: bool = True,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Write the weights, and last the manifest, unless there is a better result.

    Several replicas may do this at once; for one round they write the same weights.

    Args:
        store: the run's prefix.
        states: global parameters, of all fragments.
        round_: decisions that they include.
        step: outer steps that they include.
        final: nobody is left who may go on.
        sleep: waits for so many seconds.

    Raises:
        ExchangeError: others replaced it each time.
    """
    mine = Exported(round_, final)
    tensors = _by_name(states)
    for _ in range(_TRIES):
        found = exported(store)
        is_told = found is not None and found >= mine
        held = _model_round(store) if tensors else round_
        if found is not None and is_told and (found.round > round_ or held == round_):
            return
        if held is not None and held > round_:
            return  # Who has written that has the manifest still to write.
        if held == round_:
            known = {"digest": global_digest(states), "step": step}
            done = _publish(store, mine, known, [keys.MODEL] if tensors else [])
        elif held is None:
            done = _create(store, keys.MODEL, _weights(tensors, round_))
        else:  # An earlier round's.
            for key in (keys.RESULT_MANIFEST, keys.MODEL):
                store.delete_many([key])
            done = True
        if not done:
            sleep(_PAUSE_S)
    raise ExchangeError(
        f"the result of round {round_} was replaced {_TRIES} times while it was written",
        fix="See what else writes into the run's result/.",
    )


def _by_name(states: Sequence[FragmentState]) -> dict[str, torch.Tensor]:
    return {
        name: parameter
        for state in states
        for name, parameter in zip(state.names, state.parameters, strict=True)
    }


def _weights(tensors: dict[str, torch.Tensor], round_: int) -> bytes:
    return save(tensors, metadata={"format": "pt", "round": str(round_)})


def _model_round(store: ObjectStore) -> int | None:
    """The round that the exported weights are of, as they say themselves; None without any."""
    try:
        length = int.from_bytes(store.get_range(keys.MODEL, 0, _LENGTH_BYTES), "little")
        if length > _MOST_HEADER_BYTES:
            return _UNTOLD
        header = json.loads(bytes(store.get_range(keys.MODEL, _LENGTH_BYTES, length)))
        return int(header["__metadata__"]["round"])
    except NotFoundError:
        return None
    except (CorruptError, ValueError, KeyError, TypeError):
        return _UNTOLD


def _publish(
    store: ObjectStore, mine: Exported, known: Mapping[str, object], written: Sequence[str]
) -> bool:
    """Create the manifest; False if another was in its place, which then is deleted."""
    listed = {info.key for info in store.list(keys.RESULT)} | {*written}
    files = sorted(key.removeprefix(keys.RESULT) for key in listed - {keys.RESULT_MANIFEST})
    manifest = {**known, "round": mine.round, "final": mine.final, "files": files}
    if _create(store, keys.RESULT_MANIFEST, json.dumps(manifest).encode()):
        return True
    found = exported(store)
    if found is not None and found >= mine:
        return True
    store.delete_many([keys.RESULT_MANIFEST])
    return False


def _create(store: ObjectStore, key: str, data: bytes) -> bool:
    try:
        store.create(key, data)
    except AlreadyExistsError:
        return False
    return True
