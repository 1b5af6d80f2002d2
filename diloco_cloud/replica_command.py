"""The command line of a replica, for backends that start programs: written and read here.

``diloco_cloud.replica_entrypoint`` is called by its own flags, a script by its own arguments, and
any other function by this module::

    python -m diloco_cloud.replica_command package.module:function '{"argument": 1}'

The rank, and whatever else differs between replicas, travels in the environment, so all replicas of
a launch have one command. No secret is ever part of it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from diloco_cloud.entrypoints import Function
from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import Script
from diloco_cloud.launch_request import REPLICA_ENTRYPOINT, LaunchRequest

#: Characters of the longest word; the strictest provider takes 256.
LONGEST_WORD: Final = 250
#: Arguments of the replica entrypoint's ``main``, and the flags that set them.
_FLAGS: Final = {
    "rendezvous_uri": "--rendezvous-uri",
    "spec_hash": "--spec-hash",
    "world_size": "--world-size",
    "trainer_module": "--trainer-module",
    "trainer_fn": "--trainer-fn",
    "trainer_kwargs": "--trainer-kwargs-json",
}
#: Attribute of an exception that a launched run's replica has logged.
_LOGGED: Final = "_diloco_logged"


def replica_command(request: LaunchRequest, *, python: str = "python") -> list[str]:
    """What starts a replica, whichever its rank; no word is empty or too long for a provider.

    Args:
        request: a launch that has been checked; its target is no callable.
        python: the interpreter, where the replica runs.

    Raises:
        ConfigError: the target is a callable, which no command line can name, or a word is longer
            than ``LONGEST_WORD``.
    """
    target = request.target
    if isinstance(target, Script):
        return _checked([python, os.path.abspath(target.path), *target.args])
    if not isinstance(target, Function):
        raise ConfigError(
            f"{target!r} cannot be sent to another machine",
            fix='Name it: "package.module:function".',
        )
    given = {name: value for name, value in request.arguments.items() if value is not None}
    if target == Function(REPLICA_ENTRYPOINT, "main") and given.keys() <= _FLAGS.keys():
        return _checked([python, "-m", REPLICA_ENTRYPOINT, *_flags(given)])
    # Pieces that are put together again; none begins or ends with a space, which somebody on the
    # way might take off.
    text = json.dumps(request.arguments, separators=(",", ":")).replace(" ", "\\u0020")
    pieces = [text[i : i + LONGEST_WORD] for i in range(0, len(text), LONGEST_WORD)]
    return _checked([python, "-m", __name__, f"{target.module}:{target.name}", *pieces])


def _flags(given: Mapping[str, Any]) -> list[str]:
    words = []
    for name, value in given.items():
        text = json.dumps(value) if name == "trainer_kwargs" else str(value)
        words += [_FLAGS[name], text]
    return words


def _checked(words: list[str]) -> list[str]:
    for word in words:
        if len(word) > LONGEST_WORD or not word:
            raise ConfigError(
                f"the replicas' command has a word of {len(word)} characters: {word[:40]!r}",
                fix=f"Some providers take words of 1 to {LONGEST_WORD} characters; use shorter "
                "names, or pass large values through the store.",
            )
    return words


def main(argv: Sequence[str] | None = None) -> int:
    """Call the function that the command line names; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) < 2:
        sys.stderr.write(f"usage: python -m {__name__} PACKAGE.MODULE:FUNCTION JSON\n")
        return 2
    module, _, name = words[0].partition(":")
    function = getattr(importlib.import_module(module), name)
    try:
        function(**json.loads("".join(words[1:])))
    except Exception as error:
        if getattr(error, _LOGGED, False):
            return 1  # as an uncaught exception would, without a second traceback in the log
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
