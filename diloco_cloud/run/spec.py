"""What a run is: the one description that launcher, replicas and readers share.

The spec is written to ``run.json`` once, before anything is launched, and never changes. Replicas
are given the run's URI and the spec's hash, and refuse to start on any other spec.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from diloco_cloud import horizon
from diloco_cloud.errors import ConfigError
from diloco_cloud.horizon import OuterOptimizer, OuterStep
from diloco_cloud.run.fleet import Side, check_fleet, ranks_by_backend
from diloco_cloud.run.spec_checks import (
    OUTER,
    Merge,
    Reduction,
    Weighting,
    check_types,
    check_values,
)

SPEC_VERSION = 1
#: Settings that a trainer is given if its signature names them.
TRAINER_SETTINGS = (
    "sync_every",
    "rounds",
    "fragments",
    "fragment_sync_delay",
    "fragment_update_alpha",
    *OUTER,
    "seed",
)
#: Variable that holds the key of a signed run; sent to replicas as a secret.
RUN_KEY_ENV = "DILOCO_RUN_KEY"
#: Longer than a step takes, an evaluation between two of them included.
HANG_TIMEOUT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Every setting of a run that replicas must agree on, and how it was launched.

    Attributes:
        run_id: the last segment of the run's prefix.
        backend: entry-point name of the executor, by default "local"; where there is a fleet, one
            of its, by default the first.
        backend_args: by backend, keyword arguments of its executor. Never put a secret here: it is
            stored.
        replicas: number of ranks, by default 4; that of the fleet, where there is one.
        fleet: what is on which backend, in the order of ranks; empty where all replicas are on
            ``backend``, with the same settings.
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
        init_from: URI of the safetensors file the run begins with, or of another run's ``result/``;
            None: replica 0's own weights.
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
        hang_timeout: seconds without an inner step, outside of rounds, after which a supervisor
            ends a replica that stands still, and starts it again; None: never.
        checkpoint_inner: whether each replica stores its inner optimizer's state with every round,
            so that a restart goes on as if nothing had happened.
        outlier_norm: a pseudo-gradient longer than so many times the median is left out; None:
            never.
        signed: whether objects of a round carry a keyed digest; the key is the secret
            ``DILOCO_RUN_KEY``.
        gpu: per replica, in the backend's own words.
        timeout: seconds a replica may run.
        env: added to each replica's environment. Never put a secret here: it is stored.
        secrets: names of variables sent by the provider's secret channel. Their values come from
            the launcher's variables of the same name, or of another: "NAME=SOURCE".
    """

    run_id: str
    # These two are None only as they are given: `check_fleet` settles them.
    backend: str = None  # type: ignore[assignment]
    backend_args: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    replicas: int = None  # type: ignore[assignment]
    fleet: Sequence[Side] = ()
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
    hang_timeout: float | None = HANG_TIMEOUT_S
    checkpoint_inner: bool = False
    outlier_norm: float | None = 10.0
    signed: bool = False
    gpu: str | None = None
    timeout: int = 86_400
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "secrets", tuple(self.secrets))
        object.__setattr__(self, "fleet", tuple(self.fleet))
        check_types(self)
        replicas, backend = check_fleet(self.fleet, self.replicas, self.backend)
        object.__setattr__(self, "replicas", replicas)
        object.__setattr__(self, "backend", backend)
        _settle_outer_step(self)
        check_values(self)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; the inverse of :meth:`from_json`."""
        values = {**dataclasses.asdict(self), "secrets": list(self.secrets)}
        # What is younger than some runs is left out where they have it too: their digests stay.
        if self.hang_timeout == HANG_TIMEOUT_S:
            del values["hang_timeout"]
        if self.fleet:
            return {**values, "fleet": [side.to_json() for side in self.fleet]}
        del values["fleet"]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunSpec:
        """Rebuild a spec.

        Raises:
            ConfigError: a key this version does not know, or a value out of range.
        """
        _refuse_unknown(cls, values)
        for side in (sides := values.get("fleet", ())):
            _refuse_unknown(Side, side)
        spec = cls(**{**values, "fleet": [Side(**side) for side in sides]})
        if values.get("outer_optimizer") == "auto":
            # The launcher's choice stands, also where another version would choose otherwise.
            for name in ("outer_optimizer", *OUTER):
                object.__setattr__(spec, name, values.get(name, getattr(spec, name)))
        return spec

    @property
    def changed_trainer_settings(self) -> dict[str, Any]:
        """Those of :data:`TRAINER_SETTINGS` that differ from their defaults."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        # Chosen for them, no trainer has to take them; else, they are what trainers begin with.
        chosen = self.outer_step if self.outer_optimizer == "auto" else horizon.PUBLISHED
        defaults |= dict(zip(OUTER, chosen, strict=True))
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
    def ranks_by_backend(self) -> dict[str, range]:
        """The ranks that are launched on each backend, in order."""
        return ranks_by_backend(self.fleet) or {self.backend: range(self.replicas)}

    def backend_of(self, rank: int) -> str:
        """Where a rank is launched; one that the run has grown by, on ``backend``."""
        places = self.ranks_by_backend.items()
        return next((backend for backend, ranks in places if rank in ranks), self.backend)

    def on(self, backend: str) -> Side:
        """All that replicas on one backend are given: its own settings, and everybody's."""
        own = next((side for side in self.fleet if side.backend == backend), Side(backend))
        all_of_it = own.over(Side(backend, 0, self.gpu, self.env, tuple(self.secrets)))
        if self.signed and RUN_KEY_ENV not in all_of_it.secret_names:
            key = (*all_of_it.secrets, RUN_KEY_ENV)
            return dataclasses.replace(all_of_it, secrets=key)
        return all_of_it

    @property
    def digest(self) -> str:
        """Hex BLAKE3 (128 bits) of the canonical JSON."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return blake3(text.encode()).hexdigest(length=16)


def _settle_outer_step(spec: RunSpec) -> None:
    """Decide what is not given of the outer optimizer."""
    given = {name: getattr(spec, name) for name in OUTER if getattr(spec, name) is not None}
    if given and spec.outer_optimizer == "auto":
        object.__setattr__(spec, "outer_optimizer", "sgd")
    step = horizon.outer_step(spec.outer_optimizer, spec.rounds, spec.sync_every)
    values = {**dict(zip(OUTER, step, strict=True)), **given}
    if values["outer_momentum"] == 0 and "nesterov" not in given:
        values["nesterov"] = False
    for name, value in values.items():
        object.__setattr__(spec, name, value)


def _refuse_unknown(kind: type[RunSpec] | type[Side], values: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for a key that this version does not know."""
    unknown = sorted(set(values) - {f.name for f in dataclasses.fields(kind)})
    if unknown:
        raise ConfigError(
            f"the run's spec has unknown settings: {', '.join(unknown)}",
            fix="It was written by another version of diloco-cloud; use that version.",
        )
