"""The composer's trainer as a replica: GRPO, hint distillation and preference replay under DiLoCo.

    diloco-cloud launch --replicas 4 --trainer diloco_cloud.trainers.composer:train \\
        --set model=Qwen/Qwen2.5-0.5B-Instruct --set task=arithmetic --sync-every 20 --rounds 50

Every rank rolls out prompts of its own; every ``sync_every`` optimizer steps the policies are
merged. The result is a model that transformers loads, or an adapter that peft loads.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_cloud.errors import ConfigError, MissingDependencyError
from diloco_cloud.trainers.composer_channels import check_read, load_functions, makes_rollouts
from diloco_cloud.trainers.composer_settings import (
    check_channels,
    check_dtype,
    check_grpo,
    check_loss_type,
    taid_schedule,
    weight,
)
from diloco_cloud.trainers.pretrained import TINY, Pretrained, load_pretrained
from diloco_cloud.trainers.run_length import run_length

if TYPE_CHECKING:
    from torch import nn

    from diloco_cloud.outer.manager import MockManager


def train(
    *,
    manager: MockManager,
    rank: int,
    world_size: int,
    model: str,
    task: str | None = None,
    task_args: Mapping[str, Any] | None = None,
    prompts: str | None = None,
    rewards: Sequence[str] = (),
    dpo_pairs: str | None = None,
    rows: int = 4096,
    sync_every: int = 20,
    rounds: int | None = None,
    inner_steps: int | None = None,
    seed: int = 0,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    dtype: str = "float32",
    lora: Mapping[str, Any] | None = None,
    learning_rate: float = 1e-6,
    batch_size: int = 8,
    num_generations: int = 8,
    max_completion_length: int = 256,
    gradient_accumulation_steps: int = 1,
    gradient_checkpointing: bool = False,
    logging_steps: int = 10,
    grpo: Mapping[str, Any] | None = None,
    alpha_sdpo: float | None = None,
    beta_replay: float | None = None,
    sdpo_wrapper: str = "none",
    taid: Mapping[str, Any] | None = None,
    channels: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train one replica.

    Args:
        manager: the run's manager; carries rounds, figures and results to the store.
        rank: of this replica, from 0.
        world_size: number of replicas.
        model: name on the Hugging Face hub, folder, GGUF file, ``package:NAME/FILE.gguf``, or
            "tiny" for a small one with random weights.
        task: "arithmetic", "reasoning_gym", "human_eval", or "pkg.module:Class".
        task_args: settings of the task.
        prompts: JSONL file of rows with ``prompt``, instead of a task.
        rewards: import paths of reward functions, besides the task's.
        dpo_pairs: JSONL file of preference pairs, for channel 3.
        rows: prompts a task makes for each replica.
        sync_every: optimizer steps between two merges.
        rounds: times ``sync_every`` is the length of the run, unless ``inner_steps`` says it.
        inner_steps: length of the run where ``rounds`` does not say it.
        seed: of the prompts, of their order and of sampling; each rank and life has its own.
        outer_lr: of the outer SGD.
        outer_momentum: of the outer SGD.
        nesterov: whether that momentum is Nesterov's.
        dtype: of the weights. Without ``lora`` they are "float32": AdamW's small updates are lost
            in weights of 16 bits. A GPU that has bf16 computes in it anyway.
        lora: of peft's LoraConfig; trains, exchanges and exports the adapter alone.
        learning_rate: of the inner AdamW.
        batch_size: completions per micro-batch.
        num_generations: completions per prompt.
        max_completion_length: tokens.
        gradient_accumulation_steps: micro-batches of an optimizer step.
        gradient_checkpointing: whether to save memory by computing activations twice.
        logging_steps: optimizer steps between two logs.
        grpo: further settings of trl.GRPOConfig, without those that have a name here.
        alpha_sdpo: weight of channel 2; by default 0.1 where rows bring hints, and else 0.
        beta_replay: weight of channel 3; by default 0.05 with ``dpo_pairs``, and else 0.
        sdpo_wrapper: "none", "taid" or "entropy_opd".
        taid: of TAIDScheduler (``t_start``, ``t_end``); for "taid". ``t`` is linear in the run's
            agreed step, so that all replicas have the same.
        channels: further keywords of ComposerReplicationTrainer, without those above; functions
            (``hint_generator``, ``tools``, …) by import path.

    Returns:
        JSON values: steps and tokens of this process, the learning rate it ended with, the last
        reward and the mean of all (None where nothing was scored), the rewards not had by reason,
        the prompts of all replicas that were skipped, and what each channel learnt from.

    Raises:
        ConfigError: settings, model or data that cannot work, or a channel that has a weight and
            nothing to learn from; raised before any training.
        MissingDependencyError: a package is missing.
        RewardError: a reward function failed.
    """
    try:
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

        from diloco_cloud.composer.trainer import ComposerReplicationTrainer
        from diloco_cloud.trainers.composer_callback import ComposerCallback
        from diloco_cloud.trainers.composer_data import replica_prompts
        from diloco_cloud.trainers.composer_rollouts import own_rollouts, sdpo_weight
    except ImportError as error:
        raise MissingDependencyError(
            f"the composer needs trl ({error})", fix="pip install 'diloco-cloud[train]'"
        ) from None
    steps = run_length(sync_every, rounds, inner_steps)
    check_grpo(grpo)
    check_loss_type(grpo, GRPOConfig)
    check_channels(channels, ComposerReplicationTrainer, GRPOTrainer)
    check_dtype(dtype, has_lora=lora is not None)
    schedule = taid_schedule(sdpo_wrapper, taid, steps)
    adapter, keywords = _lora(lora), load_functions(channels)
    data = replica_prompts(
        rank=rank,
        world_size=world_size,
        attempt=manager.store.exchange.attempt,
        seed=seed,
        count=rows,
        task=task,
        task_args=task_args or {},
        prompts=prompts,
        rewards=rewards,
        pairs=dpo_pairs,
        has_prompts="environment_factory" not in keywords,
    )
    alpha_sdpo = sdpo_weight(alpha_sdpo, data, keywords, sdpo_wrapper)
    beta_replay = weight(
        "beta_replay",
        beta_replay,
        default=0.05,
        has_data=data.pairs is not None,
        needs="dpo_pairs",
    )
    check_read(
        keywords,
        sdpo_wrapper=sdpo_wrapper,
        has_hints=data.brings("hint", "error_kind") or makes_rollouts(keywords),
        has_error_kinds=data.brings("error_kind"),
        has_pairs=data.pairs is not None,
    )
    callback = ComposerCallback(
        manager,
        taid=schedule,
        sync_every=sync_every,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        nesterov=nesterov,
    )
    with tempfile.TemporaryDirectory(prefix="diloco-composer-") as folder:
        built = Path(folder) if model == TINY else None
        loaded = load_pretrained(model, dtype=dtype, cache=built)
        settings = {
            "output_dir": f"{folder}/output",
            "max_steps": steps,
            "learning_rate": learning_rate,
            "per_device_train_batch_size": batch_size,
            "num_generations": num_generations,
            "max_completion_length": max_completion_length,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "activation_checkpointing": gradient_checkpointing,
            "logging_steps": logging_steps,
            "seed": data.seed,
            # The run's prefix is what a replica goes on from.
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            **_precision(dtype),
            **(grpo or {}),
        }
        config = _config(GRPOConfig, settings)
        rollouts = own_rollouts(
            data,
            loaded,
            keywords,
            alpha_sdpo=alpha_sdpo,
            max_completion_length=max_completion_length,
            template_options=config.chat_template_kwargs,
        )
        try:
            policy, adapter = _policy(loaded.model, adapter, manager.init_from)
            trainer = ComposerReplicationTrainer(
                model=policy,
                processing_class=loaded.tokenizer,
                reward_funcs=data.rewards,
                args=config,
                train_dataset=rollouts.rows,
                callbacks=[callback],
                peft_config=adapter,
                dpo_pairs=data.pairs,
                alpha_sdpo=rollouts.alpha_sdpo,
                beta_replay=beta_replay,
                sdpo_wrapper=sdpo_wrapper,
                taid_t=None if schedule is None else schedule.linear(0),
                **keywords,
            )
        except ValueError as error:
            raise _as_config_error(error) from error
        if manager.init_from is not None and trainer.ref_model is not None:
            # TRL has loaded it by the model's name.
            unwrap = trainer.accelerator.unwrap_model
            unwrap(trainer.ref_model).load_state_dict(unwrap(trainer.model).state_dict())
        trainer.policy_clock = manager.current_step
        callback.trainer = trainer
        trainer.train()
        manager.save_result(_result_files(trainer.model, loaded))
        return _result(trainer, steps, prompts_skipped=rollouts.skipped)


def _policy(model: Any, adapter: Any, init_from: str | None) -> tuple[nn.Module, Any]:
    """The model that the trainer is made on, and the adapter that the trainer is to make.

    A run that begins with given weights has them in the model before the trainer is made: what the
    trainer takes for the reference policy is then what the run begins with. Its outer loop alone
    would load them too late.
    """
    if init_from is None:
        return model, adapter
    from diloco_cloud.outer.start import begin_with

    if adapter is not None:
        from peft import get_peft_model

        model = get_peft_model(model, adapter)
    begin_with(init_from, model)
    return model, None


def _as_config_error(error: ValueError) -> ConfigError:
    """What TRL and peft refuse while the trainer is made is a setting that cannot work."""
    if isinstance(error, ConfigError):
        return error
    return ConfigError(
        f"the trainer cannot be made with these settings: {error}",
        fix="Look at grpo, lora (target_modules), channels and the model's chat template.",
    )


def _result(trainer: Any, steps: int, *, prompts_skipped: int) -> dict[str, Any]:
    # TRL logs None for a window in which nothing was scored.
    logged = [line.get("reward") for line in trainer.state.log_history]
    rewards = [value for value in logged if value is not None and math.isfinite(value)]
    return {
        "inner_steps": steps,
        "steps_taken": trainer.state.global_step,
        "tokens": trainer.tokens_trained,
        "learning_rate": trainer.optimizer.param_groups[0]["lr"],
        "reward": rewards[-1] if rewards else None,
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "reward_failures": dict(trainer.rewards.failures),
        "prompts_skipped": prompts_skipped + trainer.prompts_skipped,
        **{
            f"{name}_{what}": activity.total[what]
            for name, activity in trainer.activity.items()
            for what in ("active", "tokens", "skipped")
        },
    }


def _precision(dtype: str) -> dict[str, Any]:
    """Mixed precision on a GPU that has bf16; none on a CPU, or for weights that are bf16."""
    import torch

    has_gpu = torch.cuda.is_available()
    mixed = has_gpu and dtype == "float32" and torch.cuda.is_bf16_supported()
    return {"bf16": mixed, "use_cpu": not has_gpu, "dataloader_pin_memory": has_gpu}


def _config(kind: Any, settings: Mapping[str, Any]) -> Any:
    try:
        return kind(**settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"GRPOConfig does not take these settings: {error}",
            fix="batch_size * gradient_accumulation_steps must be a multiple of num_generations; "
            "grpo= holds further names of trl.GRPOConfig.",
        ) from error


def _lora(settings: Mapping[str, Any] | None) -> Any:
    if settings is None:
        return None
    from peft import LoraConfig

    try:
        return LoraConfig(task_type="CAUSAL_LM", **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"LoraConfig does not take {dict(settings)}: {error}") from error


def _result_files(model: Any, loaded: Pretrained) -> dict[str, bytes]:
    """What makes the exported weights a model that transformers, or an adapter that peft loads."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loaded.tokenizer.save_pretrained(folder)
        if hasattr(model, "peft_config"):
            # It holds the merged parameters; who ends last leaves the last ones.
            model.save_pretrained(folder)
        else:
            model.config.save_pretrained(folder)
            model.generation_config.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
