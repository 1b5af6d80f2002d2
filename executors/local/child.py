"""Calls the entrypoint inside a replica's process, and leaves its result for ``collect``.

Executed by path, ``python -P child.py DIRECTORY``, under the user's own interpreter settings. It
imports the standard library only, and first of all restores the launcher's import path.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing.process
import multiprocessing.spawn
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any, Final

#: Attribute of an exception that a launched run's replica has logged.
_LOGGED: Final = "_diloco_logged"


def _load(spec: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function to call, and its keyword arguments."""
    if "callable" not in spec:
        sys.argv = [spec["module"]]
        module = importlib.import_module(spec["module"])
        return getattr(module, spec["function"]), spec["arguments"]
    process = multiprocessing.process.current_process()
    # As in a child of multiprocessing: a launching script that has no __main__ guard is told so,
    # instead of launching again from every replica.
    process._inheriting = True  # type: ignore[attr-defined]
    try:
        multiprocessing.spawn.prepare(spec["preparation"])
        with open(spec["callable"], "rb") as file:
            function, arguments = pickle.load(file)
    finally:
        del process._inheriting  # type: ignore[attr-defined]
    return function, arguments


def _write(directory: str, outcome: dict[str, Any]) -> None:
    """Write the outcome whole or not at all."""
    path = os.path.join(directory, "outcome.json")
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(outcome, file)
    os.replace(temporary, path)


def _keep_result(directory: str, result: Any, *, as_pickle: bool) -> dict[str, Any]:
    """The outcome of a call that returned ``result``."""
    try:
        text = json.dumps(result)
        if not as_pickle or json.loads(text) == result:
            return {"ok": True, "result": result}
    except (TypeError, ValueError):
        pass
    if not as_pickle:
        message = f"the result, a {type(result).__name__}, is not JSON and was dropped"
        sys.stderr.write(f"{message}\n")
        return {"ok": True, "result": None}
    with open(os.path.join(directory, "result.pickle"), "wb") as file:
        pickle.dump(result, file)
    return {"ok": True, "pickled": True}


def _describe(error: BaseException) -> dict[str, Any]:
    """The outcome of a call that raised ``error``."""
    name = type(error).__name__
    lines = str(error).strip().splitlines()
    # torch.cuda.OutOfMemoryError and its like, known by name since torch may not be loaded.
    reason = "out_of_memory" if name in ("MemoryError", "OutOfMemoryError") else None
    return {"ok": False, "error": f"{name}: {lines[0]}" if lines else name, "reason": reason}


def main() -> None:
    """Run the entrypoint that ``spec.json`` names."""
    directory = sys.argv[1]
    with open(os.path.join(directory, "spec.json"), encoding="utf-8") as file:
        spec = json.load(file)
    sys.path[:] = spec["sys_path"]
    try:
        function, arguments = _load(spec)
        result = function(**arguments)
        outcome = _keep_result(directory, result, as_pickle="callable" in spec)
    except Exception as error:
        _write(directory, _describe(error))
        if getattr(error, _LOGGED, False):
            sys.exit(1)  # as an uncaught exception would, without a second traceback in the log
        raise
    _write(directory, outcome)


if __name__ == "__main__":
    main()
