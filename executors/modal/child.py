"""Calls the entrypoint in a replica's own process, and leaves what came of it in a file.

Executed by path, ``python -P child.py DIRECTORY``. The standard library only, and first of all the
import path of the process that started it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any, Final

#: Attribute of an exception that a launched run's replica has logged.
_LOGGED: Final = "_diloco_logged"


def _returned(result: Any) -> dict[str, Any]:
    """The outcome of a call that returned ``result``."""
    try:
        json.dumps(result)
    except (TypeError, ValueError):
        sys.stderr.write(f"the result, a {type(result).__name__}, is not JSON and was dropped\n")
        result = None
    return {"result": result}


def _raised(error: BaseException) -> dict[str, Any]:
    """The outcome of a call that raised ``error``."""
    name = type(error).__name__
    lines = str(error).strip().splitlines()
    # torch.cuda.OutOfMemoryError and its like, known by name since torch may not be loaded.
    reason = "out_of_memory" if name in ("MemoryError", "OutOfMemoryError") else None
    return {"error": f"{name}: {lines[0]}" if lines else name, "reason": reason}


def _write(directory: str, outcome: dict[str, Any]) -> None:
    """Write the outcome whole or not at all."""
    path = os.path.join(directory, "outcome.json")
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(outcome, file)
    os.replace(f"{path}.part", path)


def main() -> None:
    """Call what ``job.json`` names."""
    directory = sys.argv[1]
    with open(os.path.join(directory, "job.json"), encoding="utf-8") as file:
        job = json.load(file)
    sys.path[:] = job["sys_path"]
    sys.argv = [job["module"]]
    try:
        function = getattr(importlib.import_module(job["module"]), job["function"])
        outcome = _returned(function(**job["arguments"]))
    except Exception as error:
        _write(directory, _raised(error))
        if getattr(error, _LOGGED, False):
            sys.exit(1)  # as an uncaught exception would, without a second traceback in the log
        raise
    _write(directory, outcome)


if __name__ == "__main__":
    main()
