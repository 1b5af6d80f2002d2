"""A run's fleet: which of its replicas are launched where, and what is different there.

Replicas of one run may sit on several backends, as they meet in the store only. Each backend has
its own words for a GPU, and replicas on it may need their own credentials for the store.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from diloco_cloud.errors import ConfigError
from diloco_cloud.secrets import parse_secret

DEFAULT_BACKEND: Final = "local"
DEFAULT_REPLICAS: Final = 4


@dataclass(frozen=True)
class Side:
    """The part of a run that is on one backend.

    Attributes:
        backend: entry-point name of the executor.
        replicas: how many are launched there. 0: none, and the rest is for those that a `resume`
            starts there.
        gpu: of each, in the backend's own words; None: the run's.
        env: added to the run's, or in its place. Never put a secret here: it is stored.
        secrets: the same: names of variables, or "NAME=SOURCE" where the launcher's variable has
            another name.
    """

    backend: str
    replicas: int = 0
    gpu: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "secrets", tuple(self.secrets))
        for entry in self.secrets:
            parse_secret(entry)
        replicas: object = self.replicas
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
            raise ConfigError(
                f"the fleet has {replicas!r} replicas on {self.backend}",
                fix="It must be a whole number.",
            )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**dataclasses.asdict(self), "secrets": list(self.secrets)}

    @property
    def secret_names(self) -> tuple[str, ...]:
        """The replicas' names of the variables in ``secrets``."""
        return tuple(parse_secret(entry)[0] for entry in self.secrets)

    def over(self, common: Side) -> Side:
        """These settings, and those of ``common`` that they do not replace."""
        mine = set(self.secret_names)
        env = {k: v for k, v in common.env.items() if k not in mine}
        replaced = mine | set(self.env)
        inherited = [s for s in common.secrets if parse_secret(s)[0] not in replaced]
        return dataclasses.replace(
            self,
            gpu=common.gpu if self.gpu is None else self.gpu,
            env={**env, **self.env},
            secrets=(*inherited, *self.secrets),
        )


def ranks_by_backend(fleet: Sequence[Side]) -> dict[str, range]:
    """The ranks launched on each backend: they are handed out in the fleet's order."""
    launched = [side for side in fleet if side.replicas]
    ends = itertools.accumulate(side.replicas for side in launched)
    return {
        side.backend: range(end - side.replicas, end)
        for side, end in zip(launched, ends, strict=True)
    }


def check_fleet(
    fleet: Sequence[Side], replicas: int | None, backend: str | None
) -> tuple[int, str]:
    """How many replicas a run has, and which backend is its own, as its fleet says.

    Args:
        fleet: of the run.
        replicas: as given; None: as many as the fleet has, or the default.
        backend: as given; None: the fleet's first, or the default.

    Raises:
        ConfigError: they contradict each other.
    """
    names = [side.backend for side in fleet]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"the fleet has {name} twice", fix="Name each backend once, with all its replicas."
            )
    launched = ranks_by_backend(fleet)
    if not launched:
        chosen = DEFAULT_BACKEND if backend is None else backend
        return DEFAULT_REPLICAS if replicas is None else replicas, chosen
    total = sum(map(len, launched.values()))
    if replicas not in (None, total):
        raise ConfigError(
            f"replicas is {replicas}, and the fleet has {total}", fix="Leave replicas out."
        )
    if backend is None:
        return total, next(iter(launched))
    if backend not in launched:
        raise not_in_fleet(backend, launched)
    return total, backend


def not_in_fleet(backend: str, fleet: Mapping[str, object]) -> ConfigError:
    """The error for a backend that was chosen, where all replicas are on others."""
    there = ", ".join(fleet)
    return ConfigError(
        f"the backend {backend} was chosen, and the replicas are on {there}",
        fix=f"Give it some (--replicas {backend}=1,…), all (--replicas 4), or choose none.",
    )
