"""What a run's settings may be: the first that cannot work is refused, with what would."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from diloco_cloud.codec_registry import require_codec
from diloco_cloud.errors import ConfigError
from diloco_cloud.horizon import OuterOptimizer
from diloco_cloud.run.backend_args import looks_secret
from diloco_cloud.secrets import parse_secret

if TYPE_CHECKING:
    from diloco_cloud.run.spec import RunSpec

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
OUTER = ("outer_lr", "outer_momentum", "nesterov")
_OPTIONAL = ("replicas", "rounds", "quorum", "grace", "outlier_norm", "hang_timeout", *OUTER)
_POSITIVE = ("round_timeout", "join_timeout", "heartbeat", "hang_timeout", "outer_lr")
_NUMBERS = (
    "grace",
    "round_timeout",
    "join_timeout",
    "heartbeat",
    "hang_timeout",
    "outlier_norm",
    "outer_lr",
    "outer_momentum",
    "fragment_update_alpha",
)
#: More add nothing: each takes chunks of a round, and a fast link carries many replicas' worth.
MOST_REDUCERS = 64
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


def check_types(spec: RunSpec) -> None:
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


def check_values(spec: RunSpec) -> None:
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
        check(value is None or value > 0, f"{name} is {value!r}", "It must be positive.")
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
    for entry in spec.secrets:
        parse_secret(entry)
    for name in ("trainer_args", "backend_args"):
        try:
            json.dumps(getattr(spec, name))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{name} are not JSON: {error}", fix="Use strings, numbers, lists and tables."
            ) from None


def check_env(spec: RunSpec) -> None:
    """Raise ``ConfigError`` for a variable that would be stored, and looks like a secret.

    Apart from the rest, because runs that are stored already must stay readable.
    """
    _refuse_secrets(spec.env)
    for side in spec.fleet:
        _refuse_secrets(side.env, f"{side.backend}:")


def _refuse_secrets(env: Mapping[str, str], whose: str = "") -> None:
    for name in env:
        if looks_secret(name):
            raise ConfigError(
                f"{name} looks like a secret, and env is stored with the run",
                fix=f"Pass it with --secret {whose}{name}.",
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
