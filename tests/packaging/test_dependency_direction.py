"""Who may import whom, read from the source; docs/architecture.md draws it."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "diloco_cloud"

#: Executors and the launcher share these; they know no run, no store and no tensor.
CONTRACT = {
    *("errors", "executor", "entrypoints", "executor_registry", "launch_request"),
    *("replica_command", "collecting", "secrets", "extras"),
}

#: The rooms of the package, and the other rooms each may import, at any depth.
MAY_IMPORT = {
    "errors": set(),
    "executor": {"errors"},
    "secrets": {"errors"},
    "extras": set(),
    "entrypoints": CONTRACT,
    "executor_registry": CONTRACT,
    "launch_request": CONTRACT,
    "replica_command": CONTRACT,
    "collecting": CONTRACT,
    "executors": CONTRACT,
    "store": {"errors", "secrets"},
    # Loads a codec of the exchange when one is asked for; knows their names without.
    "codec_registry": {"errors", "exchange"},
    "exchange": {"errors", "keys", "store", "codec_registry"},
    # Read by replicas and by whoever watches them, and so without tensors.
    "result": {"errors", "keys", "store"},
    "outer": {"errors", "keys", "store", "exchange", "result"},
    "trainers": {"errors", "outer", "store", "keys", "composer"},
    "composer": {"errors"},
    "keys": set(),
    "horizon": set(),
    "exports": CONTRACT,
    "run": CONTRACT | {"store", "keys", "horizon", "codec_registry", "result"},
    "chaos": CONTRACT | {"store", "exchange", "outer", "run", "keys"},
    "cli": CONTRACT | {"store", "run", "chaos", "horizon", "exports"},
    "testing": CONTRACT,
    "replica": CONTRACT | {"store", "exchange", "outer", "run", "keys", "result"},
    "replica_entrypoint": CONTRACT | {"store", "exchange", "outer", "run", "keys", "replica"},
    "reducer_entrypoint": CONTRACT
    | {"store", "exchange", "outer", "run", "keys", "replica", "replica_entrypoint"},
}
#: Rooms that a launcher loads: nothing in them costs more than a few milliseconds to import.
LIGHT = {*CONTRACT, "run", "cli", "executors"}
HEAVY = {"torch", "torchft", "transformers", "numpy", "obstore", "fsspec", "matplotlib"}


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    deferred: bool


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        for name in names:
            path = Path(folder, name)
            if path.suffix == ".py":
                parts = ("diloco_cloud", *path.relative_to(PACKAGE).with_suffix("").parts)
                yield ".".join(parts).removesuffix(".__init__"), ast.parse(path.read_text())


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        assert node.module is not None
        # `from diloco_cloud import keys` imports a module; `from ….errors import X` does not,
        # but the extra component changes neither the room nor the top-level package.
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _walk(node: ast.AST, deferred: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Nodes below ``node``, and whether they run only when a function does (or never)."""
    for child in ast.iter_child_nodes(node):
        inner = deferred or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            inner = True
        yield child, inner
        yield from _walk(child, inner)


IMPORTS = [
    Import(module, name, deferred)
    for module, tree in _modules()
    for node, deferred in _walk(tree, deferred=False)
    for name in _names(node)
]


def test_modules_are_found() -> None:
    rooms = {_room(i.importer) for i in IMPORTS}
    assert {"run", "store", "exchange", "executors"} <= rooms


def test_rooms_are_all_drawn() -> None:
    rooms = {_room(module) for module, _ in _modules()} - {""}
    assert rooms == set(MAY_IMPORT)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_room_imports_only_what_it_may(room: str) -> None:
    # A name of the package itself, such as `from diloco_cloud import __version__`, is no room.
    broken = [
        i
        for i in IMPORTS
        if _room(i.importer) == room
        and i.imported.startswith("diloco_cloud.")
        and _room(i.imported) not in {room, "__version__", *MAY_IMPORT[room]}
    ]
    assert broken == []


def test_only_entry_points_lead_to_executors() -> None:
    """Nothing imports a backend, not even another backend."""
    backends = {path.name for path in (PACKAGE / "executors").iterdir() if path.is_dir()}

    def backend(module: str) -> str | None:
        parts = module.split(".")
        inside = parts[:2] == ["diloco_cloud", "executors"] and len(parts) > 2
        return parts[2] if inside and parts[2] in backends else None

    broken = [
        i for i in IMPORTS if backend(i.imported) and backend(i.importer) != backend(i.imported)
    ]
    assert broken == []


def test_launcher_side_never_loads_heavy_modules_on_import() -> None:
    heavy = HEAVY | {"diloco_cloud.exchange", "diloco_cloud.outer", "diloco_cloud.trainers"}
    broken = [
        i
        for i in IMPORTS
        if _room(i.importer) in LIGHT
        and not i.deferred
        and any(i.imported == name or i.imported.startswith(f"{name}.") for name in heavy)
    ]
    assert broken == []


def test_package_never_imports_tests_or_repository_scripts() -> None:
    outside = {"tests", "examples", "benchmarks", "executors", "pytest"}
    broken = [i for i in IMPORTS if i.imported.split(".")[0] in outside]
    assert [i for i in broken if _room(i.importer) != "testing"] == []  # it is made for pytest
