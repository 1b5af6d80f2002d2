"""Executors by name, found through the entry points of installed packages.

A package adds a backend by declaring it, and nothing of it is imported until it is chosen::

    [project.entry-points."diloco_cloud.executors"]
    mycloud = "my_package:MyCloudExecutor"
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, NoReturn

from diloco_cloud.errors import (
    ConfigError,
    DilocoError,
    MissingDependencyError,
    UnknownBackendError,
    UsageError,
)
from diloco_cloud.executor import ServerlessExecutor

GROUP: Final = "diloco_cloud.executors"
#: Orchestrators that a run can be exported to.
_EXPORTED: Final = frozenset({"kubernetes", "skypilot"})


def executor_names() -> list[str]:
    """The backends that are installed, sorted; their SDKs may be absent."""
    return sorted(entry_points(group=GROUP).names)


def require_backend(name: str) -> None:
    """Raise ``UnknownBackendError`` unless a backend of that name is installed; loads nothing."""
    if name not in executor_names():
        raise _unknown(name)


def get_executor(name: str, **kwargs: Any) -> ServerlessExecutor:
    """Load a backend and make its executor.

    Args:
        name: as in ``executor_names()``.
        **kwargs: of the executor's constructor.

    Raises:
        UnknownBackendError: no backend of that name is installed.
        MissingDependencyError: the backend's SDK is not installed.
        ConfigError: the executor does not accept ``kwargs``, or a value of them.
        UsageError: the backend is declared twice, or is broken.
    """
    entry = _find(name)
    try:
        factory = entry.load()
        _check_settings(name, factory, kwargs)
        executor = factory(**kwargs)
    except DilocoError:
        raise
    except ImportError as error:
        _raise_missing(name, entry, error)
    except TypeError as error:
        raise ConfigError(
            f"the backend {name!r} does not accept {kwargs}: {error}",
            fix="Check the backend's settings.",
        ) from error
    except Exception as error:  # whatever a plug-in of somebody else's raises
        raise _broken(name, entry, f"{type(error).__name__}: {error}") from error
    if not isinstance(executor, ServerlessExecutor):
        raise _broken(name, entry, "it is not a ServerlessExecutor")
    return executor


def _check_settings(name: str, factory: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that the executor's constructor does not have."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # not a callable, or one that does not tell
        return
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    # What takes a callable, such as a clock, is there for tests: no user could give one.
    known = [one.name for one in parameters if "Callable" not in str(one.annotation)]
    taken = {one.name for one in parameters}
    for key in kwargs:
        if key not in taken:
            near = difflib.get_close_matches(key.replace("-", "_"), known, n=1, cutoff=0.5)
            listed = f"Its settings: {', '.join(known)}." if known else "It has none."
            raise ConfigError(
                f"the backend {name!r} has no setting {key!r}",
                fix=f"Did you mean {near[0]!r}?" if near else listed,
            )


def _find(name: str) -> EntryPoint:
    # A dictionary: one distribution may be found twice, by an editable install for example.
    found = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}
    if not found:
        raise _unknown(name)
    if len(found) > 1:
        raise UsageError(
            f"the backend {name!r} is declared more than once: {', '.join(sorted(found))}",
            fix="Uninstall all but one of these packages.",
        )
    return next(iter(found.values()))


def _unknown(name: str) -> UnknownBackendError:
    names = executor_names()
    installed = f"Installed: {', '.join(names)}."
    if name in _EXPORTED:
        fix = f"`diloco-cloud export --to {name}` prints what it takes. {installed}"
        return UnknownBackendError(f"{name} starts replicas itself, and is no backend", fix=fix)
    close = difflib.get_close_matches(name, names, n=1)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    return UnknownBackendError(f"there is no backend {name!r}", fix=guess + installed)


def _raise_missing(name: str, entry: EntryPoint, error: ImportError) -> NoReturn:
    """Tell an absent SDK from a plug-in whose own modules are missing."""
    missing = (error.name or "").partition(".")[0]
    if not missing or missing == entry.module.partition(".")[0]:
        raise _broken(name, entry, str(error)) from error
    package = entry.dist.name if entry.dist is not None else entry.module.partition(".")[0]
    extra = _extra(name, entry)
    install = f"{package}[{extra}]" if extra else missing
    raise MissingDependencyError(
        f"the backend {name!r} needs {missing}, which is not installed",
        fix=f"pip install '{install}'",
    ) from error


def _extra(name: str, entry: EntryPoint) -> str | None:
    """The extra that brings the backend's SDK: named like it, or like its first word."""
    offered = entry.dist.metadata.get_all("Provides-Extra") if entry.dist is not None else None
    candidates = (name, name.partition("-")[0])
    return next((extra for extra in candidates if extra in (offered or ())), None)


def _broken(name: str, entry: EntryPoint, why: str) -> UsageError:
    return UsageError(
        f"the backend {name!r} ({entry.value}) cannot be used: {why}",
        fix="Update or uninstall the package that declares it.",
    )
