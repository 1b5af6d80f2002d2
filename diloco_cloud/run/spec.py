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
from typing import Any, Literal, TypeAlias, get_args

from blake3 import blake3

from diloco_cloud import horizon
from diloco_cloud.codec_registry import require_codec
from diloco_cloud.errors import ConfigError
from diloco_cloud.horizon import OuterOptimizer, OuterStep

SPEC_VERSION = 1
_AT_LEAST_1 = (
    "replicas",
    "sync_every",
    "rounds",
    "fragments",
    "snapshot_every",
    "quorum",
    "timeout",
)
#: Given together, or decided by ``outer_optimizer``.
_OUTER = ("outer_lr", "outer_momentum", "nesterov")
_OPTIONAL = ("rounds", "quorum", "grace", "outlier_norm", *_OUTER)
_POSITIVE = ("round_timeout", "join_timeout", "heartbeat", "outer_lr")
_NUMBERS = (
    "grace",
    "round_timeout",
    "join_timeout",
    "heartbeat",
    "outlier_norm",
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
    *_OUTER,
    "seed",
)
#: More add nothing: each takes chunks of a round, and a fast link carries many replicas' worth.
MOST_REDUCERS = 64
#: Variable that holds the key of a signed run; sent to replicas as a secret.
RUN_KEY_ENV = "DILOCO_RUN_KEY"
#: Run ids name provider jobs too, so they keep to what all providers accept.
RUN_ID = re.compile(r"[a-z][a-z0-9-]{0,38}[a-z0-9]")

Reduction: TypeAlias = Literal["auto", "all-gather", "sharded"]
Merge: TypeAlias = Literal["mean", "rda"]
Weighting: TypeAlias = Literal["tokens", "equal", "quality"]
#: Settings that are one of a few words.
_WORDS: dict[str, tuple[str, ...]] = {
    "reduction": get_args(Reduction),
    "merge": get_args(Merge),
    "weighting": get_args(Weighting),
    "outer_optimizer": get_args(OuterOptimizer),
}


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Every setting of a run that replicas must agree on, and how it was launched.

    Attributes:
        run_id: the last segment of the run's prefix.
        backend: entry-point name of the executor.
        backend_args: by backend, keyword arguments of its executor. Never put a secret here: it is
            stored.
        replicas: number of ranks.
        trainer: "package.module:function", called as ``train(*, manager, rank,
            world_size, **trainer_args)``.
        trainer_args: JSON values, passed to the trainer as keywords.
        sync_every: inner optimizer steps between two syncs of one fragment (H).
        rounds: how often each fragment is synchronised; None leaves the end to the trainer.
        fragments: parts of the model synchronised in turn; 1 is plain DiLoCo.
        fragment_sync_delay: inner steps a transfer overlaps (tau, arXiv:2501.18512).
        fragment_update_alpha: weight of the local parameters in the merge, 0 to 1.
        outer_optimizer: "averaging" or "nesterov", as :mod:`diloco_cloud.horizon` has them; "auto"
            is the one that suits the run's length; "sgd" is what the next three say.
        outer_lr, outer_momentum, nesterov: outer SGD (arXiv:2311.08105, section 3): 0.7, 0.9 and
            True, or as ``outer_optimizer`` has them. It becomes "sgd" where it is "auto" and one of
            them is given.
        merge: "mean", or "rda": directions and lengths averaged on their own, tensor by tensor, but
            for embeddings (Decoupled DiLoCo, arXiv:2604.21428).
        weighting: contributions count by "tokens", all the same ("equal"), or by "quality": tokens
            times tokens per inner step (Decoupled DiLoCo).
        seed: of the initial weights and, with the rank, of everything random in a replica.
        init_from: URI of the safetensors file the run begins with; None: replica 0's own weights.
        codec: how contributions are encoded: "fp32" (as they are), "bf16", "int8", "e3m0", "e2m1",
            "sparse", or one of an installed package.
        reduction: "all-gather" (everyone reads everything), "sharded" (rank k averages every N-th
            chunk) or "auto", by which moves fewer bytes.
        reducers: jobs without a GPU that average chunks in the replicas' place.
        snapshot_every: rounds between two snapshots of the outer state.
        quorum: contributions without which no round is decided; None: half of the replicas that
            are there, so that any survivor goes on.
        grace: seconds to wait for the others once a quorum is in; None: learnt from their arrivals.
        round_timeout: seconds to wait for the peers of a round that nothing is known of.
        join_timeout: seconds to wait, when all begin, for replicas that have not started yet.
        heartbeat: seconds between two signs of life of a replica.
        max_restarts: how often in a row a supervisor starts a replica again that does not get into
            a round in between; 0 turns supervision off.
        checkpoint_inner: whether each replica stores its inner optimizer's state with every round,
            so that a restart goes on as if nothing had happened.
        outlier_norm: a pseudo-gradient longer than so many times the median is left out; None:
            never.
        signed: whether objects of a round carry a keyed digest; the key is the secret
            ``DILOCO_RUN_KEY``.
        gpu: per replica, in the backend's own words.
        timeout: seconds a replica may run.
        env: added to each replica's environment. Never put a secret here: it is stored.
        secrets: names of environment variables sent by the provider's secret channel.
    """

    run_id: str
    backend: str = "local"
    backend_args: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    replicas: int = 4
    trainer: str = "diloco_cloud.trainers.language_model:train"
    trainer_args: Mapping[str, Any] = field(default_factory=dict)
    sync_every: int = 500
    rounds: int | None = None
    fragments: int = 1
    fragment_sync_delay: int = 0
    fragment_update_alpha: float = 0.0
    outer_optimizer: OuterOptimizer = "auto"
    outer_lr: float | None = None
    outer_momentum: float | None = None
    nesterov: bool | None = None
    merge: Merge = "mean"
    weighting: Weighting = "tokens"
    seed: int = 0
    init_from: str | None = None
    codec: str = "fp32"
    reduction: Reduction = "auto"
    reducers: int = 0
    snapshot_every: int = 5
    quorum: int | None = None
    grace: float | None = None
    round_timeout: float = 1800.0
    join_timeout: float = 600.0
    heartbeat: float = 5.0
    max_restarts: int = 3
    checkpoint_inner: bool = False
    outlier_norm: float | None = 10.0
    signed: bool = False
    gpu: str | None = None
    timeout: int = 86_400
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "secrets", tuple(self.secrets))
        _check_types(self)
        _settle_outer_step(self)
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
        spec = cls(**values)
        if values.get("outer_optimizer") == "auto":
            # The launcher's choice stands, also where another version would choose otherwise.
            for name in ("outer_optimizer", *_OUTER):
                object.__setattr__(spec, name, values.get(name, getattr(spec, name)))
        return spec

    @property
    def changed_trainer_settings(self) -> dict[str, Any]:
        """Those of :data:`TRAINER_SETTINGS` that differ from their defaults."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        # Chosen for them, no trainer has to take them; else, they are what trainers begin with.
        chosen = self.outer_step if self.outer_optimizer == "auto" else horizon.PUBLISHED
        defaults |= dict(zip(_OUTER, chosen, strict=True))
        values = {name: getattr(self, name) for name in TRAINER_SETTINGS}
        return {name: value for name, value in values.items() if value != defaults[name]}

    @property
    def outer_step(self) -> OuterStep:
        """The outer SGD's settings, decided."""
        assert self.outer_lr is not None
        assert self.outer_momentum is not None
        assert self.nesterov is not None
        return OuterStep(self.outer_lr, self.outer_momentum, self.nesterov)

    @property
    def secret_names(self) -> tuple[str, ...]:
        """Of all variables that replicas get by the provider's secret channel."""
        own = (RUN_KEY_ENV,) if self.signed and RUN_KEY_ENV not in self.secrets else ()
        return (*self.secrets, *own)

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
    for name in _POSITIVE:
        value = getattr(spec, name)
        check(value > 0, f"{name} is {value!r}", "It must be positive.")
    check(
        spec.quorum is None or spec.quorum <= spec.replicas,
        f"quorum {spec.quorum} is more than the {spec.replicas} replicas",
        "Ask for at most as many contributions as there are replicas.",
    )
    check(
        spec.grace is None or spec.grace >= 0,
        f"grace is {spec.grace!r}",
        "It must be at least 0 seconds.",
    )
    check(
        0 <= spec.reducers <= MOST_REDUCERS,
        f"reducers is {spec.reducers!r}",
        f"It must be between 0 and {MOST_REDUCERS}.",
    )
    check(
        not (spec.reducers and spec.reduction == "all-gather"),
        f"{spec.reducers} reducers would have nothing to do: reduction is all-gather",
        'Set reduction to "auto" or "sharded", or leave reducers out.',
    )
    require_codec(spec.codec)
    check(
        not (spec.merge == "rda" and spec.codec == "sparse"),
        "merge rda does not go with the codec sparse",
        "The few values that sparse sends would be stretched to the length of all: use mean.",
    )
    check(
        spec.max_restarts >= 0, f"max_restarts is {spec.max_restarts!r}", "It must be at least 0."
    )
    check(
        spec.outlier_norm is None or spec.outlier_norm > 1,
        f"outlier_norm is {spec.outlier_norm!r}",
        "It must be above 1: a multiple of the median norm.",
    )
    check(
        0 <= spec.outer_step.momentum < 1,
        f"outer_momentum is {spec.outer_momentum!r}",
        "It must be at least 0 and below 1.",
    )
    check(
        not (spec.nesterov and spec.outer_step.momentum == 0),
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
    _check_trainer_name(spec.trainer)
    for name in ("trainer_args", "backend_args"):
        try:
            json.dumps(getattr(spec, name))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{name} are not JSON: {error}", fix="Use strings, numbers, lists and tables."
            ) from None


def _settle_outer_step(spec: RunSpec) -> None:
    """Decide what is not given of the outer optimizer."""
    given = {name: getattr(spec, name) for name in _OUTER if getattr(spec, name) is not None}
    if given and spec.outer_optimizer == "auto":
        object.__setattr__(spec, "outer_optimizer", "sgd")
    step = horizon.outer_step(spec.outer_optimizer, spec.rounds, spec.sync_every)
    values = {**dict(zip(_OUTER, step, strict=True)), **given}
    if values["outer_momentum"] == 0 and "nesterov" not in given:
        values["nesterov"] = False
    for name, value in values.items():
        object.__setattr__(spec, name, value)


def _check_types(spec: RunSpec) -> None:
    """Raise ``ConfigError`` for a setting of the wrong type; what is compared later is a number."""
    wanted: dict[str, tuple[Callable[[object], bool], str]] = {
        **dict.fromkeys(
            ("seed", "fragment_sync_delay", "max_restarts", "reducers", *_AT_LEAST_1),
            (_is_int, "a whole number"),
        ),
        **dict.fromkeys(_NUMBERS, (_is_number, "a number")),
        **dict.fromkeys(("nesterov", "checkpoint_inner", "signed"), (_is_bool, "true or false")),
    }
    for name, (is_right, kind) in wanted.items():
        value = getattr(spec, name)
        if not is_right(value) and not (name in _OPTIONAL and value is None):
            raise ConfigError(f"{name} is {value!r}", fix=f"It must be {kind}.")
    for name, words in _WORDS.items():
        if getattr(spec, name) not in words:
            *others, last = (f'"{word}"' for word in words)
            raise ConfigError(
                f"{name} is {getattr(spec, name)!r}",
                fix=f"It must be {', '.join(others)} or {last}.",
            )


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


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
