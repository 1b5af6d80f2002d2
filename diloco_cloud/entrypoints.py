"""Entrypoint strings, resolved without importing what they name.

A trainer's module loads torch, which a launcher has no use for; so modules are looked up, and their
sources read, but they are not executed.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any, TypeAlias

from diloco_cloud.errors import ConfigError, TrainerImportError
from diloco_cloud.executor import Entrypoint, Script

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Function:
    """An importable function, not yet imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


Target: TypeAlias = Function | Script | Callable[..., Any]


def resolve(entrypoint: Entrypoint, *, callables: bool = False) -> Target:
    """Find out what an entrypoint means, importing no more than parent packages.

    Raises:
        ConfigError: a malformed entrypoint, or a callable where there can be none.
        TrainerImportError: no such module, script or function.
    """
    if isinstance(entrypoint, Script):
        if not os.path.isfile(entrypoint.path):
            raise TrainerImportError(
                f"there is no script {entrypoint.path!r}", fix="Give the path of a Python file."
            )
        return entrypoint
    if isinstance(entrypoint, str):
        return _resolve_name(entrypoint)
    if not callable(entrypoint):
        raise ConfigError(
            f"a {type(entrypoint).__name__} cannot be an entrypoint",
            fix='Use "package.module", "package.module:function", a Script or a callable.',
        )
    if not callables:
        raise ConfigError(
            "this backend cannot run a callable of the launching process",
            fix='Put it in a module the replicas have, and name it: "package.module:function".',
        )
    return entrypoint


def _resolve_name(name: str) -> Function:
    if name.endswith(".py") or "/" in name or os.sep in name:
        raise ConfigError(
            f"{name!r} is a path, and an entrypoint string names a module",
            fix=f"To run a file, use Script({name!r}).",
        )
    module, colon, function = name.partition(":")
    if not _DOTTED.fullmatch(module) or (colon and not _IDENTIFIER.fullmatch(function)):
        raise ConfigError(
            f"{name!r} is not an entrypoint",
            fix='Write "package.module" (its main is called) or "package.module:function".',
        )
    spec = find_module(module)
    if not colon and spec is None and "." in module:
        module, _, function = module.rpartition(".")
        spec = find_module(module)
    if spec is None:
        raise TrainerImportError(
            f"no module {name.partition(':')[0]!r} can be imported here",
            fix="Check the spelling, install the package, or add its folder to PYTHONPATH.",
        )
    function = function or "main"
    if not _may_define(spec, function):
        raise TrainerImportError(
            f"module {module!r} has no function {function!r}",
            fix='Name one it has: "package.module:function".',
        )
    return Function(module, function)


def find_module(name: str) -> ModuleSpec | None:
    """The spec of a module, importing parents only where their path cannot be known otherwise."""
    if name in sys.modules:  # also where the parent is no package, as in os.path
        return _find_in(name, None)
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        spec = _find_in(".".join(parts[:end]), path)
        if spec is None:
            break
        path = spec.submodule_search_locations
        if path is None and end < len(parts):
            return None
    if spec is None and len(parts) > 1:
        return _find_importing_parents(name)
    return spec


def _find_in(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__spec__", None) is not None:
        return loaded.__spec__
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


def _find_importing_parents(name: str) -> ModuleSpec | None:
    """For packages that extend ``__path__`` when imported."""
    try:
        return importlib.util.find_spec(name)
    except ImportError:
        return None
    except Exception as error:  # whatever the parent's own code raises
        raise TrainerImportError(
            f"{name.rpartition('.')[0]!r} cannot be imported: {type(error).__name__}: {error}",
            fix="Correct the package, or name a module of another one.",
        ) from error


def _may_define(spec: ModuleSpec, name: str) -> bool:
    """Whether a module can have a global ``name``; True where only importing it would tell."""
    module = sys.modules.get(spec.name)
    if module is not None and not getattr(spec, "_initializing", False):
        return callable(getattr(module, name, None))
    get_source = getattr(spec.loader, "get_source", None)
    try:
        source = get_source(spec.name) if get_source is not None else None
        tree = ast.parse(source) if source is not None else None
    except ImportError:
        return True
    except SyntaxError as error:
        raise TrainerImportError(
            f"module {spec.name!r} is not valid Python: {error}", fix="Correct the file."
        ) from None
    if tree is None:
        return spec.origin is not None
    names = _global_names(tree)
    return name in names or "*" in names or "__getattr__" in names


def _global_names(tree: ast.Module) -> set[str]:
    """Names a module may bind when it is executed."""
    names: set[str] = set()
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
            continue
        if isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        nodes.extend(ast.iter_child_nodes(node))
    return names
