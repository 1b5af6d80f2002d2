"""The composer replica's settings: refused where they would be overwritten, ignored or lost."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from diloco_cloud.errors import ConfigError

if TYPE_CHECKING:
    from diloco_cloud.composer.losses import TAIDScheduler

#: Names of GRPOConfig that have a setting of their own; else a run could end before its rounds do.
_OWN_SETTING: Final[Mapping[str, str]] = {
    "max_steps": "rounds or inner_steps",
    "num_train_epochs": "rounds or inner_steps",
    "learning_rate": "learning_rate",
    "per_device_train_batch_size": "batch_size",
    "num_generations": "num_generations",
    "max_completion_length": "max_completion_length",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "activation_checkpointing": "gradient_checkpointing",
    "gradient_checkpointing": "gradient_checkpointing",
    "logging_steps": "logging_steps",
    "seed": "seed",
    "output_dir": "nothing: the run's prefix has what is kept",
}
#: Keywords of the trainer that the replica gives itself, or that have a setting of their own.
_GIVEN: Final = frozenset(
    {
        *("alpha_sdpo", "beta_replay", "sdpo_wrapper", "taid_t", "taid_scheduler", "dpo_pairs"),
        *("model", "reward_funcs", "args", "train_dataset", "processing_class", "callbacks"),
        *("peft_config", "self", "kwargs"),
    }
)


def check_grpo(grpo: Mapping[str, Any] | None) -> None:
    """Refuse settings of GRPOConfig that the replica's own would contradict.

    Raises:
        ConfigError: see above.
    """
    for name in sorted(_OWN_SETTING.keys() & (grpo or {}).keys()):
        raise ConfigError(
            f"grpo sets {name}, which has a setting of its own", fix=f"Set {_OWN_SETTING[name]}."
        )


def check_loss_type(grpo: Mapping[str, Any] | None, config: Any) -> None:
    """Refuse a loss that TRL would find unknown only in the first step.

    Args:
        grpo: further settings of GRPOConfig.
        config: that class. Its help is where it lists them.

    Raises:
        ConfigError: see above.
    """
    loss = (grpo or {}).get("loss_type")
    known = re.findall(r"'(\w+)'", str(config.__dataclass_fields__["loss_type"].metadata["help"]))
    if loss is not None and known and loss not in known:
        raise ConfigError(
            f"grpo sets loss_type to {loss!r}, which TRL has not",
            fix=f"Use {', '.join(dict.fromkeys(known))}.",
        )


def check_channels(channels: Mapping[str, Any] | None, *trainers: type) -> None:
    """Refuse keywords that the trainer has not, or that the replica gives it.

    Args:
        channels: further keywords of the trainer.
        *trainers: it and its bases that have keywords.

    Raises:
        ConfigError: see above.
    """
    known = {name for one in trainers for name in inspect.signature(one).parameters}
    free = known - _GIVEN - {"args"}
    for name in sorted((channels or {}).keys() - free):
        if name in _GIVEN:
            raise ConfigError(
                f"channels sets {name}, which the replica sets itself",
                fix="Set alpha_sdpo, beta_replay, sdpo_wrapper, taid, dpo_pairs, model, rewards, "
                "grpo or lora beside channels, not in it.",
            )
        raise ConfigError(
            f"the trainer has no {name!r} (in channels)", fix=f"It has {', '.join(sorted(free))}."
        )


def taid_schedule(
    wrapper: str, settings: Mapping[str, Any] | None, steps: int
) -> TAIDScheduler | None:
    """The schedule of TAID's ``t``; None for another wrapper.

    Args:
        wrapper: "taid" or another.
        settings: of the schedule.
        steps: of the whole run.

    Raises:
        ConfigError: settings without the wrapper, or that the schedule does not take.
    """
    from diloco_cloud.composer.losses import TAIDScheduler

    if wrapper != "taid":
        if settings:
            raise ConfigError(
                f"taid is set, and sdpo_wrapper is {wrapper!r}", fix='Set sdpo_wrapper="taid".'
            )
        return None
    taken = {"t_start", "t_end"}
    for name in sorted((settings or {}).keys() - taken):
        raise ConfigError(
            f"taid has no {name!r} here: t is linear in the run's agreed step",
            fix="It has t_start and t_end.",
        )
    return TAIDScheduler(steps, disable_adaptive=True, **(settings or {}))


def check_dtype(dtype: str, *, has_lora: bool) -> None:
    """Refuse to train weights that are too coarse to move.

    Raises:
        ConfigError: weights of 16 bits, without an adapter, which has 32.
    """
    if dtype in ("bfloat16", "float16", "half") and not has_lora:
        raise ConfigError(
            f"dtype is {dtype!r}: most of an update is lost when such weights are rounded",
            fix='Leave dtype at "float32" (a GPU that has bf16 computes in it all the same), or '
            "set lora: an adapter is trained in float32.",
        )


def weight(name: str, value: float | None, *, default: float, has_data: bool, needs: str) -> float:
    """A channel's weight in force.

    Args:
        name: of the setting.
        value: as set; None for ``default`` where the channel has data, and else off.
        default: see there.
        has_data: whether the channel can fire.
        needs: what it needs for that.

    Raises:
        ConfigError: a weight above 0 for a channel that cannot fire.
    """
    if value is None:
        return default if has_data else 0.0
    if value > 0 and not has_data:
        raise ConfigError(
            f"{name} is {value:g}, and the channel has no data, so it cannot fire",
            fix=f"Give {needs}, or leave {name} out.",
        )
    return value
