"""What a run is: the one description that launcher, replicas and readers share.

The spec is written to ``run.json`` once, before anything is launched, and never changes. Replicas
are given the run's URI and the spec's hash, and refuse to start on any other spec.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal, TypeAlias

from blake3 import blake3

from diloco_cloud.errors import ConfigError

SPEC_VERSION = 1
_AT_LEAST_1 = ("replicas", "sync_every", "rounds", "fragments", "snapshot_every", "timeout")
_NUMBERS = (
    "round_timeout",
    "join_timeout",
    "outer_lr",
    "outer_momentum",
    "fragment_update_alpha",
)
#: Settings that a trainer is given if its signature names them.
TRAINER_SETTINGS = (
    "sync_every",
    "rounds",
    "fragments",
    "fragment_sync_delay",
    "fragment_update_alpha",
    "outer_lr",
    "outer_momentum",
    "nesterov",
    "seed",
)
#: Run ids name provider jobs too, so they keep to what all providers accept.
RUN_ID = re.compile(r"[a-z][a-z0-9-]{0,38}[a-z0-9]")

Reduction: TypeAlias = Literal["auto", "all-gather", "sharded"]


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Every setting of a run that replicas must agree on, and how it was launched.

    Attributes:
        run_id: the last segment of the run's prefix.
        backend: entry-point name of the executor.
        replicas: number of ranks.
        trainer: "package.module:function", called as ``train(*, manager, rank,
            world_size, **trainer_args)``.
        trainer_args: JSON values, passed to the trainer as keywords.
        sync_every: inner optimizer steps between two syncs of one fragment (H).
        rounds: how often each fragment is synchronised; None leaves the end to the trainer.
        fragments: parts of the model synchronised in turn; 1 is plain DiLoCo.
        fragment_sync_delay: inner steps a transfer overlaps (tau, arXiv:2501.18512).
        fragment_update_alpha: weight of the local parameters in the merge, 0 to 1.
        outer_lr, outer_momentum, nesterov: outer SGD (arXiv:2311.08105, section 3).
        seed: of the initial weights and, with the rank, of everything random in a replica.
        init_from: URI of the safetensors file the run begins with; None: replica 0's own weights.
        reduction: "all-gather" (everyone reads everything), "sharded" (rank k reduces shard k) or
            "auto", by which moves fewer bytes.
        snapshot_every: rounds between two snapshots of the outer state.
        round_timeout: seconds to wait for the peers of a round.
        join_timeout: seconds to wait for all replicas to be there the first time.
        gpu: per replica, in the backend's own words.
        timeout: seconds a replica may run.
        env: added to each replica's environment. Never put a secret here: it is stored.
        secrets: names of environment variables sent by the provider's secret channel.
    """

    run_id: str
    backend: str = "local"
    replicas: int = 4
    trainer: str = "diloco_cloud.trainers.language_model:train"
    trainer_args: Mapping[str, Any] = field(default_factory=dict)
    sync_every: int = 500
    rounds: int | None = None
    fragments: int = 1
    fragment_sync_delay: int = 0
    fragment_update_alpha: float = 0.0
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    seed: int = 0
    init_from: str | None = None
    reduction: Reduction = "auto"
    snapshot_every: int = 5
    round_timeout: float = 1800.0
    join_timeout: float = 3600.0
    gpu: str | None = None
    timeout: int = 86_400
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "secrets", tuple(self.secrets))
        _check_types(self)
        _validate(self)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; the inverse of :meth:`from_json`."""
        values = dataclasses.asdict(self)
        return {**values, "secrets": list(self.secrets)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunSpec:
        """Rebuild a spec.

        Raises:
            ConfigError: a key this version does not know, or a value out of range.
        """
        unknown = sorted(set(values) - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise ConfigError(
                f"the run's spec has unknown settings: {', '.join(unknown)}",
                fix="It was written by another version of diloco-cloud; use that version.",
            )
        return cls(**values)

    @property
    def changed_trainer_settings(self) -> dict[str, Any]:
        """Those of :data:`TRAINER_SETTINGS` that differ from their defaults."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        values = {name: getattr(self, name) for name in TRAINER_SETTINGS}
        return {name: value for name, value in values.items() if value != defaults[name]}

    @property
    def digest(self) -> str:
        """Hex BLAKE3 (128 bits) of the canonical JSON."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return blake3(text.encode()).hexdigest(length=16)


def _validate(spec: RunSpec) -> None:
    """Raise ``ConfigError`` for the first value that cannot work."""

    def check(ok: bool, message: str, fix: str) -> None:
        if not ok:
            raise ConfigError(message, fix=fix)

    check(
        RUN_ID.fullmatch(spec.run_id) is not None,
        f"{spec.run_id!r} cannot be a run id",
        "Use 2 to 40 lower-case letters, digits and dashes, beginning with a letter.",
    )
    for name in _AT_LEAST_1:
        value = getattr(spec, name)
        check(value is None or value >= 1, f"{name} is {value!r}", "It must be at least 1.")
    for name in ("round_timeout", "join_timeout", "outer_lr"):
        value = getattr(spec, name)
        check(value > 0, f"{name} is {value!r}", "It must be positive.")
    check(
        0 <= spec.outer_momentum < 1,
        f"outer_momentum is {spec.outer_momentum!r}",
        "It must be at least 0 and below 1.",
    )
    check(
        not (spec.nesterov and spec.outer_momentum == 0),
        "nesterov needs a momentum",
        "Set outer_momentum above 0, or nesterov to false.",
    )
    check(
        0 <= spec.fragment_update_alpha <= 1,
        f"fragment_update_alpha is {spec.fragment_update_alpha!r}",
        "It must be between 0 and 1.",
    )
    check(
        spec.sync_every % spec.fragments == 0,
        f"sync_every {spec.sync_every} is not divisible by {spec.fragments} fragments",
        "Fragments are synchronised in turn, one every sync_every / fragments steps.",
    )
    check(
        0 <= spec.fragment_sync_delay < spec.sync_every // spec.fragments,
        f"fragment_sync_delay is {spec.fragment_sync_delay!r}",
        "It must be at least 0 and below sync_every / fragments.",
    )
    check(
        spec.reduction in ("auto", "all-gather", "sharded"),
        f"reduction is {spec.reduction!r}",
        'It must be "auto", "all-gather" or "sharded".',
    )
    _check_trainer_name(spec.trainer)
    try:
        json.dumps(spec.trainer_args)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"trainer_args are not JSON: {error}", fix="Use strings, numbers, lists and tables."
        ) from None


def _check_types(spec: RunSpec) -> None:
    """Raise ``ConfigError`` for a setting of the wrong type; what is compared later is a number."""
    wanted: dict[str, tuple[Callable[[object], bool], str]] = {
        **dict.fromkeys(("seed", "fragment_sync_delay", *_AT_LEAST_1), (_is_int, "a whole number")),
        **dict.fromkeys(_NUMBERS, (_is_number, "a number")),
        "nesterov": (lambda value: isinstance(value, bool), "true or false"),
    }
    for name, (is_right, kind) in wanted.items():
        value = getattr(spec, name)
        if not is_right(value) and not (name == "rounds" and value is None):
            raise ConfigError(f"{name} is {value!r}", fix=f"It must be {kind}.")


def _check_trainer_name(trainer: str) -> None:
    module, _, function = trainer.partition(":")
    if "/" in module or module.endswith(".py"):
        path = PurePosixPath(module).with_suffix("")
        inside = not path.is_absolute() and ".." not in path.parts
        name = f"{'.'.join(path.parts) if inside else path.name}:{function or 'train'}"
        where = "" if inside else f", and launch from {path.parent}"
        raise ConfigError(
            f"the trainer {trainer!r} is a path, and a trainer is named by its module",
            fix=f"Write {name}{where}.",
        )
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", trainer) is None:
        raise ConfigError(
            f"{trainer!r} does not name a trainer", fix='Write "package.module:function".'
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
