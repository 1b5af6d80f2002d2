"""The train function: found by its name, and called as ``train(*, manager, rank, world_size)``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from diloco_cloud.errors import TrainerImportError
from diloco_cloud.outer.hand_over import HandedOver
from diloco_cloud.replica.outcome import exit_code
from diloco_cloud.replica.termination import Terminated

if TYPE_CHECKING:
    from diloco_cloud.outer.manager import MockManager


def load_trainer(module: str, function: str) -> Callable[..., Any]:
    """Import a train function.

    Raises:
        TrainerImportError: there is no such module or function, or importing it failed.
    """
    if module.endswith(".py") or "/" in module:
        path = PurePath(module)
        raise TrainerImportError(
            f"{module!r} is a path, and a trainer is named by its module",
            fix=f'Put the folder "{path.parent}" on PYTHONPATH and name the module "{path.stem}".',
        )
    try:
        found = getattr(importlib.import_module(module), function)
    except Terminated:
        raise
    except (Exception, SystemExit) as error:  # a script without a __main__ guard may well exit
        raise TrainerImportError(
            f"the trainer {module}:{function} cannot be imported: {type(error).__name__}: {error}",
            fix="It must be importable where the replicas run.",
        ) from error
    if not callable(found):
        raise TrainerImportError(f"{module}:{function} is not a function")
    return found  # type: ignore[no-any-return]


def accepted(function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``settings`` that ``function`` takes by name, or all if it takes ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(settings)
    names = {p.name for p in parameters}
    return {name: value for name, value in settings.items() if name in names}


def run_trainer(
    train: Callable[..., Any],
    manager: MockManager,
    rank: int,
    world_size: int,
    kwargs: Mapping[str, Any],
    *,
    check: Callable[[], None] = lambda: None,
) -> Any:
    """Call the train function; leave the run if it returns, and stop the manager either way.

    A trainer that ends with ``sys.exit()`` or ``sys.exit(0)`` has returned None. One that returns
    because it was told to end, and caught what told it so, does not leave: its rank will be back.
    That is for ``check`` to say, by raising.
    """
    finished = False
    try:
        try:
            result = train(manager=manager, rank=rank, world_size=world_size, **kwargs)
        except SystemExit as error:
            if exit_code(error) != 0:
                raise
            result = None
        check()
        if manager.progress.phase == "handing over":  # and what said so was caught
            raise HandedOver
        finished = True
    finally:
        manager.shutdown(finished=finished)
    return result
