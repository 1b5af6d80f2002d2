"""A launch request, checked before anything is started.

Every executor passes its arguments through :func:`check_launch`, so that a wrong request is refused
with the same words on every backend, and before it costs anything.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from diloco_cloud.entrypoints import Function, Target, resolve
from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import RANK_ENV, Entrypoint, LaunchOptions, Script
from diloco_cloud.secrets import Secret, read_secrets

#: The program every replica of a run executes; ``world_size`` is supplied to it where missing.
REPLICA_ENTRYPOINT: Final = "diloco_cloud.replica_entrypoint"
#: Tells a replica which variable holds its rank, when a launch renamed it.
RANK_ENV_NAME: Final = "DILOCO_RANK_ENV"

_IDENTITY: Final = frozenset(
    {RANK_ENV, RANK_ENV_NAME, "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS", "DILOCO_ATTEMPT"}
)
_VARIABLE = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class LaunchRequest:
    """A launch that has been checked.

    Attributes:
        target: what each replica runs.
        arguments: keyword arguments of ``target``, without ``rank_env``.
        ranks: which ranks to start, in order.
        world_size: ranks of the run, of which ``ranks`` may be a part.
        rank_env: variable that tells a replica its rank.
        attempt: which life of these ranks this is.
        env: variables the user added.
        secrets: by variable; they travel by the provider's secret channel only, and are revealed
            where they are handed to it.
        imports: modules that ``target`` will import, besides its own.
    """

    target: Target
    arguments: dict[str, Any]
    ranks: tuple[int, ...]
    world_size: int
    rank_env: str
    attempt: int
    env: dict[str, str]
    secrets: dict[str, Secret]
    imports: tuple[str, ...] = ()

    def environment(self, rank: int) -> dict[str, str]:
        """Variables of one replica, without the secrets."""
        return {
            **self.env,
            RANK_ENV: str(rank),
            self.rank_env: str(rank),
            RANK_ENV_NAME: self.rank_env,
            "REPLICA_GROUP_ID": str(rank),
            "NUM_REPLICA_GROUPS": str(self.world_size),
            "DILOCO_ATTEMPT": str(self.attempt),
        }


def check_launch(
    n_replicas: int,
    entrypoint: Entrypoint,
    entrypoint_args: Mapping[str, Any],
    options: LaunchOptions,
    *,
    timeout: float,
    callables: bool = False,
) -> LaunchRequest:
    """Check the arguments of ``ServerlessExecutor.launch_replicas``.

    Args:
        n_replicas: at least 1.
        entrypoint: see :func:`diloco_cloud.entrypoints.resolve`.
        entrypoint_args: JSON values, or anything at all for a callable.
        options: names, ranks, environment.
        timeout: seconds, positive.
        callables: whether the backend can run a Python callable of the launcher.

    Raises:
        ConfigError: a value that cannot work, or a secret the launcher's environment lacks.
        TrainerImportError: the entrypoint names nothing that replicas could import.
    """
    if isinstance(timeout, bool) or not timeout > 0:
        raise ConfigError(f"timeout is {timeout!r}", fix="It must be a positive number of seconds.")
    ranks, world_size = _check_ranks(n_replicas, options)
    target = resolve(entrypoint, callables=callables)
    defaults = {"world_size": world_size} if _is_replica_entrypoint(target) else {}
    arguments, rank_env = _check_arguments(target, {**defaults, **entrypoint_args})
    secrets = _secret_values(options)
    for place, names in (("env", options.env), ("secrets", secrets)):
        clash = sorted(names.keys() & {*_IDENTITY, rank_env})
        if clash:
            raise ConfigError(
                f"{place} sets {', '.join(clash)}",
                fix=f"The executor sets these variables itself; remove them from {place}.",
            )
    return LaunchRequest(
        target=target,
        arguments=arguments,
        ranks=ranks,
        world_size=world_size,
        rank_env=rank_env,
        attempt=options.attempt,
        env=dict(options.env),
        secrets=secrets,
        imports=tuple(options.imports),
    )


def _is_replica_entrypoint(target: Target) -> bool:
    if isinstance(target, Function):
        return target == Function(REPLICA_ENTRYPOINT, "main")
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", None)
    return (module, name) == (REPLICA_ENTRYPOINT, "main")


def _check_ranks(n_replicas: int, options: LaunchOptions) -> tuple[tuple[int, ...], int]:
    if isinstance(n_replicas, bool) or not isinstance(n_replicas, int) or n_replicas < 1:
        raise ConfigError(f"n_replicas is {n_replicas!r}", fix="Start at least 1 replica.")
    ranks = tuple(range(n_replicas)) if options.ranks is None else tuple(options.ranks)
    world_size = n_replicas if options.world_size is None else options.world_size
    if len(ranks) != n_replicas or len(set(ranks)) != n_replicas:
        raise ConfigError(
            f"ranks {list(ranks)} are not {n_replicas} different ranks",
            fix="Make n_replicas the number of ranks to start.",
        )
    outside = [rank for rank in ranks if not 0 <= rank < world_size]
    if outside:
        raise ConfigError(
            f"rank {outside[0]} is outside a run of {world_size} replicas",
            fix="Ranks count from 0; world_size is the number of ranks of the whole run.",
        )
    return ranks, world_size


def _check_arguments(target: Target, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    arguments = dict(given)
    rank_env = arguments.pop("rank_env", RANK_ENV)
    if not isinstance(rank_env, str) or not _VARIABLE.fullmatch(rank_env):
        raise ConfigError(
            f"rank_env is {rank_env!r}", fix="It must be the name of an environment variable."
        )
    odd = [key for key in arguments if not isinstance(key, str) or not key.isidentifier()]
    if odd:
        raise ConfigError(
            f"entrypoint_args has the key {odd[0]!r}", fix="Keys must be argument names."
        )
    if isinstance(target, Script):
        if arguments:
            raise ConfigError(
                f"a script takes no keyword arguments, but got {', '.join(arguments)}",
                fix="Put them in Script(path, args=(…)).",
            )
        return arguments, rank_env
    if isinstance(target, Function):
        return _as_json(arguments), rank_env
    try:
        inspect.signature(target).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"the entrypoint cannot be called with these arguments: {error}",
            fix="Make the keys of entrypoint_args match its parameters.",
        ) from None
    except ValueError:  # some builtins have no signature
        pass
    return arguments, rank_env


def _as_json(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as any backend would deliver them."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(arguments))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"entrypoint_args are not JSON: {error}",
            fix="Use strings, numbers, booleans, lists and dicts.",
        ) from None
    return plain


def _secret_values(options: LaunchOptions) -> dict[str, Secret]:
    """The secrets, which are in ``env`` neither."""
    secrets = read_secrets(options.secrets, os.environ)
    both = sorted(secrets.keys() & options.env.keys())
    if both:
        raise ConfigError(
            f"{both[0]} is in env and a secret",
            fix="Leave it out of env, which is stored with the run and shown by its provider.",
        )
    return secrets
