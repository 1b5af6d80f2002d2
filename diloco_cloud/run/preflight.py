"""Checks of a launch that need neither a network nor an import of the trainer.

A trainer's module usually imports torch, which takes seconds; here its source is read instead.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import MappingProxyType
from typing import Any

from diloco_cloud.errors import ConfigError, MissingDependencyError, TrainerImportError
from diloco_cloud.executor import ServerlessExecutor
from diloco_cloud.run.needs import check_modules_here, check_modules_there, needed_modules
from diloco_cloud.run.spec import RUN_KEY_ENV, TRAINER_SETTINGS, RunSpec
from diloco_cloud.secrets import read_secrets
from diloco_cloud.store.opening import is_uri

#: Bytes of a key below which it is no key.
SHORTEST_KEY = 16

#: Keywords that every trainer is called with.
DOOR = ("manager", "rank", "world_size")

_LITERALS = (ast.Constant, ast.List, ast.Dict, ast.Set, ast.Tuple, ast.JoinedStr)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def check_environment(
    spec: RunSpec, backend: str | None = None, executor: ServerlessExecutor | None = None
) -> None:
    """Check what replicas will need from this machine, and from what it has installed for them.

    Args:
        spec: of the run.
        backend: that the replicas are to run on; default: the spec's.
        executor: of the backend; without it, what it installs is not looked at.

    Raises:
        MissingDependencyError: a package is not installed where replicas run, as far as that can
            be known.
        ConfigError: a secret has no value in this environment, or the run's key is too short.
    """
    needed = needed_modules(spec.trainer, spec.trainer_args)
    if (backend or spec.backend) == "local":
        for package in ("torch", "torchft"):
            if importlib.util.find_spec(package) is None:
                raise MissingDependencyError(
                    f"replicas on this machine need {package}, which is not installed",
                    fix="pip install 'diloco-cloud[diloco]'",
                )
        check_modules_here(spec.trainer, needed)
    elif executor is not None:
        check_modules_there(spec.trainer, needed, backend or spec.backend, executor)
    entries = spec.on(backend or spec.backend).secrets
    if RUN_KEY_ENV in entries and RUN_KEY_ENV not in os.environ:
        raise ConfigError(
            f"a signed run needs a key, and {RUN_KEY_ENV} has no value here",
            fix=f"export {RUN_KEY_ENV}=$(openssl rand -hex 32), and keep it: "
            "a replica can't be restarted without it.",
        )
    secrets = read_secrets(entries, os.environ)
    if spec.signed and len(secrets[RUN_KEY_ENV].reveal().encode()) < SHORTEST_KEY:
        raise ConfigError(
            f"{RUN_KEY_ENV} is shorter than {SHORTEST_KEY} bytes, and could be guessed",
            fix=f"export {RUN_KEY_ENV}=$(openssl rand -hex 32)",
        )


def check_run_key(spec: RunSpec) -> None:
    """Check that replicas on all backends of a signed run sign with the same key.

    Args:
        spec: of a run whose secrets all have a value here.

    Raises:
        ConfigError: they would not believe each other.
    """
    if not spec.signed:
        return
    used = {
        backend: read_secrets(spec.on(backend).secrets, os.environ)[RUN_KEY_ENV]
        for backend in spec.ranks_by_backend
    }
    first = next(iter(used))
    for backend, key in used.items():
        if key != used[first]:
            raise ConfigError(
                f"{first} and {backend} get different values of {RUN_KEY_ENV}",
                fix="Give all replicas of a run the same key: what the others sign is ignored.",
            )


def check_meeting_place(backends: Sequence[str], store_uri: str) -> None:
    """Check that a fleet's store is no directory that only one of its backends may see.

    Args:
        backends: that the run's replicas are on.
        store_uri: a ``file:`` URI is taken at its word: some clusters share a filesystem.

    Raises:
        ConfigError: it is a plain directory.
    """
    if len(backends) > 1 and not is_uri(store_uri):
        raise ConfigError(
            f"replicas on {' and '.join(backends)} cannot meet in {store_uri}",
            fix="Put the run in a bucket: --store s3://bucket/prefix. If all of them mount that "
            f"directory, write file://{store_uri}.",
        )


def check_trainer(
    trainer: str,
    trainer_args: Mapping[str, Any],
    directory: str,
    *,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Check that ``trainer`` exists and can be called with ``trainer_args``.

    Args:
        trainer: "package.module:function".
        trainer_args: its keywords, besides those of ``DOOR``.
        directory: searched before the interpreter's own path.
        settings: of the run, which only the trainer can put into effect.

    Raises:
        TrainerImportError: no such module or function, or one that is not a trainer.
        ConfigError: an argument or a setting the function does not take, or one it lacks.
    """
    module, _, name = trainer.partition(":")
    source = _source(trainer, module, directory)
    if source is None:
        return  # compiled: only the replica can tell
    try:
        tree = ast.parse(source.read_bytes(), filename=str(source))
    except SyntaxError as error:
        raise TrainerImportError(
            f"trainer {trainer!r}: {source}:{error.lineno} does not parse: {error.msg}",
            fix="Correct the file.",
        ) from None
    bound = list(_top_level(tree))
    names = dict(bound)
    if name not in names:
        if "*" in names or "__getattr__" in names:
            return
        near = difflib.get_close_matches(name, names, n=1)
        raise TrainerImportError(
            f"trainer {trainer!r}: {source} defines no {name!r}",
            fix=f"Did you mean {module}:{near[0]}?" if near else "Name a function of that module.",
        )
    if all(_is_literal(node, name) for other, node in bound if other == name):
        raise TrainerImportError(
            f"trainer {trainer!r} is a value, not a function",
            fix="Name a function train(*, manager, rank, world_size, **trainer_args).",
        )
    node = names[name]
    if isinstance(node, _Function) and not node.decorator_list:
        _check_signature(trainer, node.args, trainer_args)
        _check_settings(trainer, node.args, settings)


def _source(trainer: str, module: str, directory: str) -> Path | None:
    """The file of ``module``; None if it has none that can be read."""
    spec = _find(module, directory)
    if spec is None:
        top = module.partition(".")[0]
        raise TrainerImportError(
            f"trainer {trainer!r}: there is no module {module!r}",
            fix=f"Install the package {top!r}, or launch from the directory that holds it.",
        )
    origin = spec.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _find(module: str, directory: str) -> ModuleSpec | None:
    """Find ``module`` without importing its parents."""
    path = [directory, *sys.path]
    first, *rest = module.split(".")
    # importlib's own finders know editable installs, which no path lists.
    spec = PathFinder.find_spec(first, path) or importlib.util.find_spec(first)
    name = first
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec


def _top_level(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Names that a module binds, looking into top-level if, try and with blocks."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield (alias.asname or alias.name), node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from ((n.id, node) for n in ast.walk(target) if isinstance(n, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _top_level(node)


def _is_literal(node: ast.AST, name: str) -> bool:
    """Whether ``node`` assigns a literal to ``name``, which nobody can call."""
    if isinstance(node, ast.Assign):
        to_name = any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
        return to_name and isinstance(node.value, _LITERALS)
    return isinstance(node, ast.AnnAssign) and isinstance(node.value, _LITERALS)


def _check_settings(trainer: str, arguments: ast.arguments, settings: Mapping[str, Any]) -> None:
    """Refuse a setting that the trainer alone could put into effect, and does not ask for."""
    taken = {arg.arg for arg in (*arguments.args, *arguments.kwonlyargs)}
    for name, value in settings.items():
        if arguments.kwarg is None and name not in taken:
            raise ConfigError(
                f"{name} is {value!r}, which would have no effect: trainer {trainer!r} "
                "does not take it",
                fix=f"Add the keyword {name} to its signature and use it, or leave {name} out.",
            )


def _check_signature(
    trainer: str, arguments: ast.arguments, trainer_args: Mapping[str, Any]
) -> None:
    """Check the call ``fn(manager=, rank=, world_size=, **trainer_args)``."""
    positional = arguments.args
    required = [arg.arg for arg in positional[: len(positional) - len(arguments.defaults)]]
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required += [arg.arg for arg, default in pairs if default is None]
    taken = [arg.arg for arg in (*positional, *arguments.kwonlyargs)]
    anything = arguments.kwarg is not None
    for name in DOOR:
        if name not in taken and not anything:
            raise TrainerImportError(
                f"trainer {trainer!r} does not take {name!r}",
                fix="Declare it train(*, manager, rank, world_size, **trainer_args).",
            )
    for name in trainer_args:
        if name in DOOR or (name not in taken and not anything):
            near = difflib.get_close_matches(name, sorted({*taken} - {*DOOR}), n=1)
            raise ConfigError(
                f"trainer {trainer!r} takes no argument {name!r}",
                fix=f"Did you mean {near[0]!r}?" if near else _takes(taken),
            )
    given = {*DOOR, *TRAINER_SETTINGS, *trainer_args}
    lacking = [name for name in required if name not in given]
    if lacking:
        raise ConfigError(
            f"trainer {trainer!r} needs {', '.join(lacking)}",
            fix=f"Add --set {lacking[0]}=…",
        )


def _takes(names: list[str]) -> str:
    others = [name for name in names if name not in DOOR]
    return f"It takes {', '.join(others)}." if others else "It takes none."
