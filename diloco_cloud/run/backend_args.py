"""Settings of backends: keyword arguments of their executors, as they come from a user.

They are stored with the run, so that any process can make the same executor again. In a file, each
backend has a table of its own, which also holds what :mod:`diloco_cloud.run.by_backend` tells of,
and the only one chooses the backend::

    [backend.hf-jobs]
    namespace = "my-team"
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from diloco_cloud.errors import ConfigError
from diloco_cloud.executor_registry import require_backend

#: Stands for the backend that will be chosen, while that is not known.
CHOSEN: Final = ""
_SECRET_NAME: Final = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIALS)$")


def looks_secret(name: str) -> bool:
    """Whether a variable or a setting of this name would hold a secret."""
    return _SECRET_NAME.search(name.upper()) is not None


def parse_backend_args(assignments: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """``--backend-arg`` assignments by backend: ``key=value`` of the chosen one, or of a named one.

    Args:
        assignments: by "key" or "backend.key".
    """
    found: dict[str, dict[str, Any]] = {}
    for name, value in assignments.items():
        backend, _, key = name.rpartition(".")
        found.setdefault(backend or CHOSEN, {})[key] = value
    return found


def merge(layers: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Settings by backend; of each one, later layers win.

    Raises:
        ConfigError: a layer is not a table of tables.
    """
    merged: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for backend, settings in _table("backend", layer).items():
            inner = _table(f"backend.{backend or 'NAME'}", settings)
            merged[backend] = {**merged.get(backend, {}), **inner}
    return merged


def settle(values: dict[str, Any], default: str) -> None:
    """Give the settings of the chosen backend to it, in place; check what can be checked here.

    Args:
        values: all settings, merged.
        default: the backend where none was chosen.

    Raises:
        ConfigError: several backends have settings, and none was chosen; or one looks secret.
        UnknownBackendError: settings of a backend that is not installed.
    """
    args = values.pop("backend_args", None)
    if not args:
        return
    named = sorted(set(args) - {CHOSEN})
    if "backend" not in values and named and named != [default]:
        if len(named) > 1:
            raise ConfigError(
                f"there are settings for {', '.join(named)}, and no backend was chosen",
                fix=f"Add --backend {named[0]}, for example.",
            )
        values["backend"] = named[0]
    chosen = values.get("backend", default)
    if not isinstance(chosen, str):
        return  # which is an error of its own
    own = args.pop(CHOSEN, {})
    values["backend_args"] = merge([args, {chosen: own}] if own else [args])
    for backend, settings in values["backend_args"].items():
        require_backend(backend)
        _check(backend, settings)


def _check(backend: str, settings: Mapping[str, Any]) -> None:
    for name in settings:
        if looks_secret(name):
            raise ConfigError(
                f"{name} of backend {backend} looks like a secret, and is stored with the run",
                fix="Leave it out: credentials come from the environment of whoever launches.",
            )
    try:
        json.dumps(settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the settings of backend {backend} are not JSON: {error}",
            fix="Use strings, numbers, booleans, lists and tables.",
        ) from None


def _table(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{name} is {value!r}", fix="It must be a table: [backend.NAME], then KEY = VALUE."
        )
    return value
