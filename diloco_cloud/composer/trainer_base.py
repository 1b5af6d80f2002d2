"""What the trainer is made on, and what it decides before training begins."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from transformers import ProcessorMixin
from transformers.trainer_utils import get_last_checkpoint

from diloco_cloud.composer.channels import ReplayOptions
from diloco_cloud.composer.encoding import PromptEncoder
from diloco_cloud.composer.forward import ChannelForward
from diloco_cloud.composer.hints import dispatch
from diloco_cloud.composer.losses.checks import channel_weight, count
from diloco_cloud.composer.prompt_rows import PromptFilter, bring_hints
from diloco_cloud.composer.replay import Replay
from diloco_cloud.composer.teacher_context import HintGenerator, Hints
from diloco_cloud.errors import ConfigError, MissingDependencyError

logger = logging.getLogger(__name__)


def grpo_trainer() -> Any:
    """TRL's GRPOTrainer, or where TRL is absent a class that says so when it is instantiated."""
    try:
        return importlib.import_module("trl").GRPOTrainer
    except ImportError as error:
        missing = str(error)

    class GRPOTrainer:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise MissingDependencyError(
                f"ComposerReplicationTrainer needs trl ({missing})",
                fix="pip install 'diloco-cloud[train]'",
            )

    return GRPOTrainer


def check_arguments(
    arguments: Mapping[str, Any],
    *,
    weights: Mapping[str, float],
    counts: Mapping[str, int | None],
    hint_generator: Any,
) -> None:
    """Refuse what no channel could work with, and the argument that GRPOTrainer hasn't.

    Args:
        arguments: for GRPOTrainer.
        weights: of the channels, by keyword.
        counts: whole numbers above 0, by keyword; None where one is left to the trainer.
        hint_generator: a function, or None.

    Raises:
        ConfigError: see above.
    """
    for name, weight in weights.items():
        channel_weight(weight, name)
    for name, number in counts.items():
        if number is not None:
            count(number, name)
    if hint_generator is not None and not callable(hint_generator):
        raise ConfigError(
            f"hint_generator is {hint_generator!r}, which is no function",
            fix="Give a function of (error_kind, error_meta) that returns a hint or None.",
        )
    if "data_collator" in arguments:
        raise ConfigError(
            "GRPOTrainer has no data_collator: it makes its batches from rollouts",
            fix="Give hints as columns of train_dataset (hint, or error_kind and error_meta), and "
            "preference pairs as dpo_pairs.",
        )


def bare_model(trainer: Any) -> Any:
    """The model without what accelerate and peft put around it."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def context_limit(model: Any) -> int | None:
    """Tokens of a bare model's context; None where it has no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def make_passes(trainer: Any, model: Any) -> ChannelForward:
    """Runs a bare model for channels 2 and 3, without (B, T, V) where the head can be taken off."""
    is_sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    return ChannelForward(model, may_use_head=not (is_sharded or trainer.args.cast_lm_head_to_fp32))


def prompt_encoder(trainer: Any) -> PromptEncoder:
    """Writes prompts as the rollouts' are."""
    return PromptEncoder(
        trainer._tokenizer,
        trainer.tools or (),
        trainer.chat_template,
        trainer.chat_template_kwargs,
    )


def make_prompt_filter(trainer: Any, encoder: PromptEncoder, limit: int | None) -> PromptFilter:
    """Leaves out prompts after which a context of ``limit`` tokens has no room for a completion."""
    longest = None if limit is None else limit - (trainer.max_completion_length or 1)
    has_prompts = trainer.environment_factories is None  # else the environments write them
    return PromptFilter(encoder, longest, is_on=has_prompts)


def find_hints(
    trainer: Any, encoder: PromptEncoder, limit: int | None, generator: HintGenerator | None
) -> Hints | None:
    """What makes channel 2's contexts; None where the channel is off.

    Args:
        trainer: a GRPOTrainer with ``alpha_sdpo``.
        encoder: of its prompts.
        limit: tokens of the model's context, if it has a limit.
        generator: given by the user, or None.

    Raises:
        ConfigError: the channel is on and cannot fire, or the model reads images.
    """
    if not trainer.alpha_sdpo:
        return None
    from_errors = generator is not None and bool(trainer.tools)
    hints = Hints(
        encoder,
        generator or _dispatch,
        limit,
        reads_tool_errors=from_errors,
        environments={} if trainer.environment_factories is None else trainer._env_tools,
    )
    # Also where environments write the prompts: the rows they are reset by are the rollouts' rows.
    from_rows = bring_hints(trainer.train_dataset, hints)
    if not (from_rows or from_errors or trainer.rollout_func is not None):
        logger.warning(
            "channel 2 is off: alpha_sdpo is %g, and train_dataset has no hint or error_kind",
            trainer.alpha_sdpo,
        )
        return None
    if isinstance(trainer.processing_class, ProcessorMixin):
        raise ConfigError(
            "channel 2 does not read images", fix="Set alpha_sdpo=0, or use a text model."
        )
    return hints


def make_replay(
    trainer: Any,
    pairs: Iterable[Mapping[str, Any]] | None,
    options: ReplayOptions,
    *,
    batch_size: int | None,
    max_length: int,
) -> Replay | None:
    """Channel 3's stream; None where the channel is off.

    Args:
        trainer: a GRPOTrainer with ``beta_replay``.
        pairs: given by the user, or None.
        options: of the loss.
        batch_size: pairs of a process in a micro-batch; by default as many as rollouts.
        max_length: tokens of prompt and response together.

    Raises:
        ConfigError: a pair is malformed, none is usable, or the reference policy cannot be run.
    """
    if not trainer.beta_replay:
        return None
    if pairs is None:
        logger.warning(
            "channel 3 is off: beta_replay is %g, and there are no dpo_pairs", trainer.beta_replay
        )
        return None
    if options.variant == "dpo" and (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):
        raise ConfigError(
            "a sharded model cannot score the pairs before training begins",
            fix='Set dpo_variant="simpo", which needs no reference policy, or train on one device.',
        )
    return Replay(
        pairs,
        prompt_encoder(trainer),
        max_length=max_length,
        batch_size=(trainer.args.per_device_train_batch_size if batch_size is None else batch_size),
        seed=trainer.args.seed,
        needs_reference=options.variant == "dpo",
        process=trainer.accelerator.process_index,
        processes=trainer.accelerator.num_processes,
    )


def reference_policy(model: Any, *, has_new_adapter: bool) -> AbstractContextManager[Any]:
    """The model as the reference policy is before training.

    That is the model without an adapter that is new, TRL's copy of an adapter that is not, and else
    the model itself.

    Args:
        model: not wrapped.
        has_new_adapter: whether the trainer made the adapter.
    """
    adapters: Mapping[str, Any] = getattr(model, "peft_config", {})
    if "ref" not in adapters and not has_new_adapter:
        return nullcontext()
    use_adapter: Any = importlib.import_module("trl.trainer.utils").use_adapter
    found: AbstractContextManager[Any] = use_adapter(model, "ref" if "ref" in adapters else None)
    return found


def checkpoint_folder(resume_from_checkpoint: str | bool, output_dir: str) -> Path:
    """The folder that ``train`` resumes from."""
    if isinstance(resume_from_checkpoint, str):
        return Path(resume_from_checkpoint)
    last: Any = get_last_checkpoint(output_dir)  # type: ignore[no-untyped-call]
    return Path(last or output_dir)


def _dispatch(error_kind: str, meta: dict[str, Any]) -> str | None:
    return dispatch(error_kind, meta)  # type: ignore[arg-type]  # whatever a row has in it
