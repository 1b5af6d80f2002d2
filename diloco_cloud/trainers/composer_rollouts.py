"""Which rows a replica rolls out from, and whether channel 2 learns from them: before training.

Both are decided on the rows of all replicas, so that all of them decide the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diloco_cloud.composer.encoding import PromptEncoder
from diloco_cloud.composer.hints import dispatch
from diloco_cloud.composer.prompt_rows import best_hint, bring_hints, fitting_rows
from diloco_cloud.composer.teacher_context import Hints
from diloco_cloud.errors import ConfigError
from diloco_cloud.trainers.composer_channels import makes_rollouts
from diloco_cloud.trainers.composer_data import ReplicaPrompts
from diloco_cloud.trainers.composer_settings import weight

if TYPE_CHECKING:
    from datasets import Dataset

    from diloco_cloud.trainers.pretrained import Pretrained

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rollouts:
    """What a replica's trainer is given.

    Attributes:
        rows: this replica's share of those whose prompt fits the model's context.
        skipped: prompts that do not, of all replicas.
        alpha_sdpo: weight of channel 2 in this replica.
    """

    rows: Dataset
    skipped: int
    alpha_sdpo: float


def sdpo_weight(
    value: float | None, data: ReplicaPrompts, channels: Mapping[str, Any], wrapper: str
) -> float:
    """The weight of channel 2 in force; by default 0.1 where any replica has data for it.

    Args:
        value: as set, or None.
        data: of all replicas.
        channels: keywords of the trainer.
        wrapper: ``sdpo_wrapper``.

    Raises:
        ConfigError: a weight or a wrapper for a channel that has no data.
    """
    has_data = data.brings("hint", "error_kind") or makes_rollouts(channels)
    if value is None and wrapper != "none" and not has_data:
        raise ConfigError(
            f"sdpo_wrapper is {wrapper!r}, and channel 2 has no data",
            fix="Give prompts with a hint or an error_kind, or leave sdpo_wrapper out.",
        )
    if value is None and not has_data and {"hint", "error_kind"} & {*data.rows.column_names}:
        logger.warning("no row of %s has anything for a hint: channel 2 is off", data.source)
    return weight(
        "alpha_sdpo",
        value,
        default=0.1,
        has_data=has_data,
        needs="prompts with a hint or an error_kind, such as task_args.hints of arithmetic",
    )


def own_rollouts(
    data: ReplicaPrompts,
    loaded: Pretrained,
    channels: Mapping[str, Any],
    *,
    alpha_sdpo: float,
    max_completion_length: int,
    template_options: Mapping[str, Any] | None,
) -> Rollouts:
    """This replica's rows, and channel 2's weight: 0 where its share has no hint to learn from.

    Args:
        data: of all replicas.
        loaded: the model and its tokenizer.
        channels: keywords of the trainer.
        alpha_sdpo: of all replicas.
        max_completion_length: tokens.
        template_options: further arguments of the chat template.

    Raises:
        ConfigError: no prompt fits, or fewer than there are replicas; or channel 2 is on, and no
            row of any replica makes a hint that fits.
    """
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    encoder = PromptEncoder(
        loaded.tokenizer, channels.get("tools", ()), None, template_options or {}
    )
    rows, skipped = data.rows, 0
    if "environment_factory" not in channels:  # else the environments write the prompts
        longest = None if limit is None else limit - max_completion_length
        rows, skipped = fitting_rows(rows, encoder, longest)
    mine = data.mine(rows)
    if not alpha_sdpo or makes_rollouts(channels):
        return Rollouts(mine, skipped, alpha_sdpo)
    hints = Hints(encoder, channels.get("hint_generator", dispatch), limit)
    bring_hints(rows, hints)
    if best_hint(mine, hints) != "usable":
        logger.warning(
            "channel 2 is idle in this replica: of %d rows of %s, its %d have no hint that fits",
            len(rows),
            data.source,
            len(mine),
        )
        return Rollouts(mine, skipped, 0.0)
    return Rollouts(mine, skipped, alpha_sdpo)
