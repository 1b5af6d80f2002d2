"""Who this process is, as its executor's environment tells it."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from diloco_cloud.errors import ConfigError, MissingRankError
from diloco_cloud.executor import RANK_ENV
from diloco_cloud.run.spec import RUN_KEY_ENV

RENDEZVOUS_ENV = "DILOCO_RENDEZVOUS_URI"
ATTEMPT_ENV = "DILOCO_ATTEMPT"
#: Number of replicas of the run; torchft's name for it.
WORLD_SIZE_ENV = "NUM_REPLICA_GROUPS"
#: Names the variable that holds the rank, where a launch chose another than ``REPLICA_RANK``.
RANK_ENV_ENV = "DILOCO_RANK_ENV"


@dataclass(frozen=True)
class Identity:
    """One life of one rank."""

    rank: int
    attempt: int

    @classmethod
    def from_environ(cls, world_size: int, environ: Mapping[str, str] = os.environ) -> Identity:
        """Read rank and attempt.

        Raises:
            MissingRankError: the rank variable is missing (a RuntimeError).
            ConfigError: a value is no number, or the rank is outside ``[0, world_size)`` (a
                ValueError).
        """
        name = environ.get(RANK_ENV_ENV, RANK_ENV)
        if name not in environ:
            raise MissingRankError(
                f"{name} is not set",
                fix="Executors set it; by hand, give each replica a rank of its own from 0.",
            )
        rank, attempt = _number(environ, name), _number(environ, ATTEMPT_ENV, "0")
        if attempt < 0:
            raise ConfigError(f"{ATTEMPT_ENV}={attempt} is negative", fix="Attempts count from 0.")
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"{name}={rank} is outside [0, {world_size})",
                fix="Ranks begin at 0, and the run's number of replicas bounds them.",
            )
        return cls(rank, attempt)


def replicas_now(launched_with: int, environ: Mapping[str, str] = os.environ) -> int:
    """How many replicas a run has now: one that was resumed may have more or fewer than at first.

    Args:
        launched_with: how many it was launched with.
        environ: with the executor's ``NUM_REPLICA_GROUPS``, if there is an executor.

    Raises:
        ConfigError: the variable is no positive number.
    """
    number = _number(environ, WORLD_SIZE_ENV, str(launched_with))
    if number < 1:
        raise ConfigError(f"{WORLD_SIZE_ENV}={number} is no number of replicas")
    return number


def take_run_key(environ: MutableMapping[str, str] = os.environ) -> bytes:
    """The key of a signed run, taken out of the environment.

    Neither the trainer nor what it starts has a use for it, and many a tool records the whole
    environment.

    Raises:
        ConfigError: there is none.
    """
    key = environ.pop(RUN_KEY_ENV, "")
    if not key:
        raise ConfigError(
            f"this run is signed, and {RUN_KEY_ENV} is not set",
            fix=f"Launch, resume and supervise it with the run's key in {RUN_KEY_ENV}.",
        )
    return key.encode()


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a whole number") from None
