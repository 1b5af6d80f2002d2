"""A run's settings from flags, environment, a TOML file and defaults, in that order.

The file has one key per setting of :class:`~diloco_cloud.run.spec.RunSpec`, and ``name``,
``store``; ``trainer_args`` and ``env`` are tables, ``secrets`` is a list, and each backend has a
table ``[backend.NAME]``. A variable is named ``DILOCO_`` and the setting in capitals. What may be
set for single backends, :mod:`diloco_cloud.run.by_backend` tells.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import random
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_cloud import keys
from diloco_cloud.errors import ConfigError
from diloco_cloud.executor_registry import require_backend
from diloco_cloud.run import backend_args, by_backend
from diloco_cloud.run.backend_args import parse_backend_args as parse_backend_args
from diloco_cloud.run.durations import parse_duration
from diloco_cloud.run.fleet import DEFAULT_BACKEND
from diloco_cloud.run.names import DEFAULT_NAME, new_run_id
from diloco_cloud.run.spec import RunSpec
from diloco_cloud.run.spec_checks import check_env
from diloco_cloud.store.opening import is_uri

#: Where runs of the local backend go when no store is given, below the working directory.
LOCAL_STORE = "runs"

#: Without the fleet, which is made of the settings that name backends.
SPEC_KEYS = tuple(field.name for field in dataclasses.fields(RunSpec) if field.name != "fleet")
SETTING_KEYS = ("name", "store", *SPEC_KEYS)
#: Settings that are merged key by key instead of being replaced.
_TABLES = ("trainer_args", "env")
_DURATIONS = ("timeout", "round_timeout", "join_timeout", "grace", "heartbeat", "hang_timeout")
#: Settings that can be turned off.
_CAN_BE_OFF = ("outlier_norm", "hang_timeout")
#: Settings that no variable has: one is of one run, and the other's name is often somebody else's.
_NOT_VARIABLES = ("run_id", "env")
#: Variables of the same prefix that other parts read, or set for replicas.
_OTHER_VARIABLES = (
    *("ATTEMPT", "DEBUG", "HOME", "RANK_ENV", "RENDEZVOUS_URI", "RUN_KEY", "SPEC_HASH"),
    *("HF_S3_ENDPOINT", "RAY_LITERALS", "SECRETS_AT", "TERM_GRACE_S"),
)


@dataclass(frozen=True)
class Settings:
    """What is to be launched, and the store it goes to."""

    spec: RunSpec
    store_uri: str


def resolve(
    flags: Mapping[str, Any],
    *,
    environ: Mapping[str, str],
    file: str | Path | None = None,
    rng: random.Random | None = None,
) -> Settings:
    """Settle every setting.

    Args:
        flags: by setting; those not given are absent or None.
        environ: where the ``DILOCO_*`` variables are looked up.
        file: a TOML file.
        rng: source of the run id's random part.

    Raises:
        ConfigError: an unknown key, or a value that cannot work.
    """
    layers = [
        read_file(file) if file is not None else {},
        read_environment(environ),
        {key: value for key, value in flags.items() if value is not None},
    ]
    values = _merge(layers)
    name = values.pop("name", DEFAULT_NAME)
    store = values.pop("store", None)
    values.setdefault("run_id", None)
    by_backend.settle(values, values.pop("sides"))
    backend_args.settle(values, DEFAULT_BACKEND)
    if values["run_id"] is None:
        values["run_id"] = new_run_id(_text("name", name), rng=rng)
    spec = RunSpec(**_typed(values))
    check_env(spec)
    require_backend(spec.backend)  # before the store that it would need
    return Settings(spec, _store_uri(spec, store))


def read_file(path: str | Path) -> dict[str, Any]:
    """The settings in a TOML file.

    Raises:
        ConfigError: no such file, not TOML, or an unknown key.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", fix="Correct the file.") from None
    for key in values:
        if key not in SETTING_KEYS:
            raise _unknown_key(key, f"{path} has an unknown key", SETTING_KEYS)
    return by_backend.from_file(values)


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings in ``DILOCO_*`` variables, numbers and JSON parsed.

    Other variables of that prefix are not ours to judge: replicas are given some, and a trainer may
    read its own.
    """
    values: dict[str, Any] = {}
    for key in SETTING_KEYS:
        text = environ.get(_variable(key))
        if text and key not in _NOT_VARIABLES:
            values[key] = _from_text(key, text)
    return values


def known_variables() -> list[str]:
    """Every variable that begins with ``DILOCO_`` and that somebody reads."""
    others = [f"DILOCO_{name}" for name in _OTHER_VARIABLES]
    return [*(_variable(key) for key in SETTING_KEYS if key not in _NOT_VARIABLES), *others]


def parse_json_object(text: str, what: str) -> dict[str, Any]:
    """``text`` as a JSON object.

    Raises:
        ConfigError: it is something else.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{what} is not JSON: {error}", fix="""Write '{"key": 1}'.""") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{what} is not a JSON object", fix="""Write '{"key": 1}'.""")
    return values


def parse_assignments(texts: Iterable[str], what: str) -> dict[str, str]:
    """``["a=1", …]`` as a dict of texts.

    Raises:
        ConfigError: one is not an assignment.
    """
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{what} {text!r} has no '='", fix="Write KEY=VALUE.")
        values[key.strip()] = value
    return values


def parse_set(texts: Iterable[str], what: str = "--set") -> dict[str, Any]:
    """``--set`` assignments: a value that is JSON is taken as such, any other as text."""

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    return {key: value(text) for key, text in parse_assignments(texts, what).items()}


def read_env_file(path: str | Path) -> dict[str, str]:
    """``KEY=VALUE`` lines; blank lines and those that begin with # are skipped."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    kept = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return parse_assignments(kept, f"{path}:")


def _merge(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Later layers win; tables are merged, and secrets added. "sides" has those of backends."""
    layers = [by_backend.split(layer) for layer in layers]
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if key in _TABLES:
                _expect(isinstance(value, Mapping), key, value, "a table")
                value = {**merged.get(key, {}), **value}
            elif key == "backend_args":
                value = backend_args.merge([merged.get(key, {}), value])
            elif key == "secrets":
                _expect(by_backend.is_texts(value), key, value, "a list of names of variables")
                value = by_backend.merge_secrets(merged.get(key, ()), value)
            merged[key] = value
    return {**merged, "sides": by_backend.merge_sides(layers)}


def _is_off(value: Any) -> bool:
    """Whether a setting is off, as TOML and variables say it, which have no null; 0 is a number."""
    return value is False or value == "off"


def _typed(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` with durations in seconds, and types checked that ``RunSpec`` leaves alone."""
    for key in _CAN_BE_OFF:
        if _is_off(values.get(key)):
            values[key] = None
    for key in _DURATIONS:
        if values.get(key) is not None:
            seconds = parse_duration(values[key])
            values[key] = int(seconds) if key == "timeout" else seconds
    for key in ("backend", "trainer", "gpu", "run_id", "codec", "reduction", "init_from"):
        if values.get(key) is not None:
            _text(key, values[key])
    if values.get("init_from") is not None:
        values["init_from"] = _weights_uri(values["init_from"])
    _check_env("env", values.get("env", {}))
    for side in values.get("fleet", ()):
        _check_env(f"backend.{side.backend}.env", side.env)
    return values


def _check_env(table: str, env: Mapping[str, Any]) -> None:
    for key, value in env.items():
        _expect(isinstance(value, str), f"{table}.{key}", value, "a text")


def _weights_uri(text: str) -> str:
    """What ``text`` means: a safetensors file, or where the run it names has its result."""
    uri = text if is_uri(text) else str(Path(text).expanduser().absolute())
    return uri if uri.endswith(".safetensors") else f"{uri.rstrip('/')}/{keys.RESULT}"


def _store_uri(spec: RunSpec, store: object) -> str:
    if store is not None:
        text = _text("store", store)
        if text.startswith("memory:"):
            raise ConfigError(
                f"replicas are other processes, which cannot reach {text}",
                fix="Use a directory, or a bucket.",
            )
        return text if is_uri(text) else str(Path(text).expanduser().absolute())
    elsewhere = [backend for backend in spec.ranks_by_backend if backend != DEFAULT_BACKEND]
    if elsewhere:
        raise ConfigError(
            f"runs on {elsewhere[0]} need a store that all replicas reach",
            fix="Add --store s3://bucket/prefix, or set DILOCO_STORE.",
        )
    return str(Path(LOCAL_STORE).absolute())


def _from_text(key: str, text: str) -> Any:
    """A variable's text as the type of its setting."""
    parsers: dict[str, Callable[[str], Any]] = {
        "replicas": lambda value: value if "=" in value else int(value),
        **dict.fromkeys(("reducers", "sync_every", "rounds", "fragments", "seed"), int),
        **dict.fromkeys(("fragment_sync_delay", "snapshot_every", "quorum", "max_restarts"), int),
        **dict.fromkeys(("fragment_update_alpha", "outer_lr", "outer_momentum"), float),
        **dict.fromkeys(("nesterov", "checkpoint_inner", "signed"), _boolean),
        "outlier_norm": lambda value: value if _is_off(value) else float(value),
        **{key: _object_of(key) for key in ("trainer_args", "backend_args")},
        "secrets": lambda value: [name.strip() for name in value.split(",") if name.strip()],
    }
    try:
        return parsers.get(key, str)(text)
    except KeyError:
        raise ConfigError(
            f"{_variable(key)} is {text!r}", fix="It must be true or false."
        ) from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{_variable(key)} is {text!r}", fix="It must be a number.") from None


def _object_of(key: str) -> Callable[[str], dict[str, Any]]:
    return lambda text: parse_json_object(text, _variable(key))


def _boolean(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


def _variable(key: str) -> str:
    return f"DILOCO_{key.upper()}"


def _text(key: str, value: object) -> str:
    _expect(isinstance(value, str), key, value, "a text")
    return str(value)


def _expect(ok: bool, key: str, value: object, wanted: str) -> None:
    if not ok:
        raise ConfigError(f"{key} is {value!r}", fix=f"It must be {wanted}.")


def _unknown_key(key: str, message: str, known: Iterable[str]) -> ConfigError:
    near = difflib.get_close_matches(key.replace("-", "_"), sorted(known), n=1, cutoff=0.5)
    fix = f"Did you mean {near[0]}?" if near else f"Known keys: {', '.join(sorted(known))}."
    return ConfigError(f"{message}: {key}", fix=fix)
