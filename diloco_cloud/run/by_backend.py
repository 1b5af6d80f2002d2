"""Settings that each backend may have its own of: replicas, GPU, variables and secrets.

On the command line and in variables, the value names the backend: ``modal=2,hf-jobs=2`` replicas,
the GPUs ``modal=A100,hf-jobs=a10g-large``, ``modal:NAME=VALUE`` for a variable of the replicas
there, ``modal:NAME=SOURCE`` for a secret. In a file, they are keys of the backend's table::

    [backend.modal]
    replicas = 2
    gpu = "A100"
    secrets = ["AWS_ACCESS_KEY_ID=MODAL_KEY_ID"]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeGuard

from diloco_cloud.errors import ConfigError
from diloco_cloud.executor_registry import require_backend
from diloco_cloud.run import backend_args
from diloco_cloud.run.fleet import Side, not_in_fleet
from diloco_cloud.secrets import parse_secret

#: Keys of a backend's table that are no settings of its executor.
KEYS: Final = ("replicas", "gpu", "env", "secrets")
_HOW_MANY: Final = "Write a number, or BACKEND=NUMBER,BACKEND=NUMBER, such as modal=2,hf-jobs=2."
_WHICH_GPU: Final = (
    "Write a GPU, or BACKEND=GPU,BACKEND=GPU, such as modal=A100,hf-jobs=a10g-large."
)


def parse_replicas(text: str) -> int | dict[str, int]:
    """A number of replicas, or numbers by backend.

    Raises:
        ConfigError: neither.
    """
    words = _by_backend("replicas", text, _HOW_MANY)
    try:
        if isinstance(words, str):
            return int(words)
        return check_counts({backend: int(count) for backend, count in words.items()})
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"replicas is {text!r}", fix=_HOW_MANY) from None


def check_counts(counts: Mapping[str, Any]) -> dict[str, int]:
    """Numbers of replicas by backend.

    Raises:
        ConfigError: one is no number, or less than 1; or there is none.
    """
    if not counts:
        raise ConfigError("replicas is empty", fix=_HOW_MANY)
    for backend, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise ConfigError(f"replicas on {backend} is {count!r}", fix="It must be a number.")
        if count < 1:
            raise ConfigError(
                f"replicas on {backend} is {count}",
                fix="It must be at least 1: leave out a backend that is to have none.",
            )
    return dict(counts)


def from_file(values: Mapping[str, Any]) -> dict[str, Any]:
    """A file's settings with its ``[backend.NAME]`` tables under ``backend_args`` and "sides".

    Raises:
        ConfigError: such a table, or what is in it, is no table; or replicas are given twice.
    """
    if not isinstance(values.get("backend"), Mapping):
        return dict(values)
    rest = {key: value for key, value in values.items() if key != "backend"}
    tables = backend_args.merge([values["backend"]])
    sides = {backend: _taken(table) for backend, table in tables.items()}
    left = {
        backend: {key: value for key, value in table.items() if key not in sides[backend]}
        for backend, table in tables.items()
    }
    rest["backend_args"] = backend_args.merge([values.get("backend_args", {}), left])
    if len(tables) == 1:
        rest["backend"] = next(iter(tables))
    counts = {backend: own.pop("replicas") for backend, own in sides.items() if "replicas" in own}
    if counts and "replicas" in values:
        raise ConfigError(
            f"replicas is given, and replicas of {next(iter(counts))}", fix="Leave one of them out."
        )
    if counts:
        rest["replicas"] = counts
    return {**rest, "sides": {backend: own for backend, own in sides.items() if own}}


def _taken(table: Mapping[str, Any]) -> dict[str, Any]:
    """What is not the executor's of a backend's table. A list of GPUs is: it is Modal's own."""
    return {k: v for k, v in table.items() if k in KEYS and (k != "gpu" or isinstance(v, str))}


def split(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer of settings, with those that name a backend under "sides", by backend.

    Values of a wrong type that name none are left alone: they are refused where all types are.

    Raises:
        ConfigError: a value that names backends in no way there is, or one for a backend that has a
            wrong type.
    """
    rest = dict(layer)
    sides: dict[str, dict[str, Any]] = {}
    for backend, own in rest.pop("sides", {}).items():
        _check_side(backend, own)
        env, secrets = dict(own.get("env", {})), list(own.get("secrets", []))
        sides[backend] = {"gpu": own.get("gpu"), "env": env, "secrets": secrets}
    if isinstance(replicas := rest.get("replicas"), str) and "=" in replicas:
        rest["replicas"] = parse_replicas(replicas)
    for backend, gpu in _take_gpus(rest).items():
        sides.setdefault(backend, _nothing())["gpu"] = gpu
    for backend, name, value in _take_variables(rest):
        sides.setdefault(backend, _nothing())["env"][name] = value
    for backend, entry in _take_secrets(rest):
        sides.setdefault(backend, _nothing())["secrets"].append(entry)
    return {**rest, "sides": sides}


def _nothing() -> dict[str, Any]:
    return {"gpu": None, "env": {}, "secrets": []}


def _check_side(backend: str, own: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for a setting of one backend that has a wrong type."""
    wanted = {
        "env": (isinstance(own.get("env", {}), Mapping), "a table"),
        "secrets": (is_texts(own.get("secrets", [])), "a list of names of variables"),
    }
    for key, (ok, kind) in wanted.items():
        if not ok:
            raise ConfigError(f"{key} of {backend} is {own[key]!r}", fix=f"It must be {kind}.")


def _take_gpus(layer: dict[str, Any]) -> dict[str, str]:
    """GPUs by backend, taken out of a layer where it has them so."""
    gpus = layer.get("gpu")
    if isinstance(gpus, str):
        gpus = _by_backend("gpu", gpus, _WHICH_GPU)
    if not isinstance(gpus, Mapping):
        return {}
    del layer["gpu"]
    for backend, gpu in gpus.items():
        if not isinstance(gpu, str):
            raise ConfigError(f"gpu of {backend} is {gpu!r}", fix="It must be a text.")
    return dict(gpus)


def _take_variables(layer: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """Backend, name and value of variables ``BACKEND:NAME``, taken out of a layer."""
    env = layer.get("env")
    if not isinstance(env, Mapping):
        return []
    layer["env"] = {name: value for name, value in env.items() if ":" not in name}
    named = (name.partition(":") for name in env)
    return [(backend, own, env[f"{backend}:{own}"]) for backend, colon, own in named if colon]


def _take_secrets(layer: dict[str, Any]) -> list[tuple[str, str]]:
    """Backend and entry of secrets ``BACKEND:ENTRY``, taken out of a layer."""
    entries = layer.get("secrets")
    if not is_texts(entries):
        return []
    named = [entry for entry in entries if ":" in entry.partition("=")[0]]
    layer["secrets"] = [entry for entry in entries if entry not in named]
    split_up = (entry.partition(":") for entry in named)
    return [(backend, own) for backend, _, own in split_up]


def merge_sides(layers: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What is set for single backends: later layers win, also with what they set for all.

    Args:
        layers: as :func:`split` gives them.
    """
    merged: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for side in merged.values():
            _replace(side, layer)
        for backend, own in layer["sides"].items():
            side = merged.setdefault(backend, _nothing())
            _replace(side, own)
            side["gpu"] = own["gpu"] or side["gpu"]
            side["env"] |= own["env"]
            side["secrets"] += own["secrets"]
    return merged


def merge_secrets(before: Iterable[str], after: Iterable[str]) -> list[str]:
    """Names of secrets, each once: the later one tells where its value comes from."""
    return list({parse_secret(entry)[0]: entry for entry in (*before, *after)}.values())


def settle(values: dict[str, Any], sides: Mapping[str, Mapping[str, Any]]) -> None:
    """Make a fleet of the settings that name backends, in place.

    Args:
        values: all other settings, merged.
        sides: see :func:`merge_sides`.

    Raises:
        ConfigError: they contradict each other.
        UnknownBackendError: settings of a backend that is not installed.
    """
    counts: dict[str, int] = {}
    if isinstance(values.get("replicas"), Mapping):
        counts = check_counts(values.pop("replicas"))
    for backend in (*counts, *sides):
        require_backend(backend)
    if counts:
        chosen = values.setdefault("backend", next(iter(counts)))
        if str(chosen) not in counts:
            raise not_in_fleet(chosen, counts)
    if len(counts) == 1:
        values["replicas"] = counts.popitem()[1]
    elif counts and backend_args.CHOSEN in values.get("backend_args", {}):
        key = next(iter(values["backend_args"][backend_args.CHOSEN]))
        raise ConfigError(
            f"--backend-arg {key} is of which backend?",
            fix=f"Write --backend-arg {next(iter(counts))}.{key}=…",
        )
    names = dict.fromkeys((*counts, *sides))
    if names:
        values["fleet"] = [Side(name, counts.get(name, 0), **sides.get(name, {})) for name in names]


def _by_backend(what: str, text: str, how: str) -> str | dict[str, str]:
    """``BACKEND=WORD,BACKEND=WORD`` as a dict; any other text as it is.

    A word may have commas: a piece without "=" goes on with the one before.
    """
    if "=" not in text:
        return text
    found: dict[str, str] = {}
    last = None
    for piece in text.split(","):
        name, equals, word = (part.strip() for part in piece.partition("="))
        if equals and name in found:
            raise ConfigError(f"{what} names {name} twice: {text}", fix="Name each backend once.")
        if (equals and not (name and word)) or (not equals and (last is None or not name)):
            raise ConfigError(f"{what} is {text!r}", fix=how)
        if equals:
            found[name], last = word, name
        elif last is not None:
            found[last] += f",{name}"
    return found


def _replace(side: dict[str, Any], by: Mapping[str, Any]) -> None:
    """Forget what a later setting is given in the place of."""
    if by.get("gpu") is not None:
        side["gpu"] = None
    given = {*by.get("env", {}), *(parse_secret(entry)[0] for entry in by.get("secrets", ()))}
    side["env"] = {name: value for name, value in side["env"].items() if name not in given}
    side["secrets"] = [entry for entry in side["secrets"] if parse_secret(entry)[0] not in given]


def is_texts(value: object) -> TypeGuard[Sequence[str]]:
    """Whether a value is a list of texts."""
    return isinstance(value, (list, tuple)) and all(isinstance(entry, str) for entry in value)
