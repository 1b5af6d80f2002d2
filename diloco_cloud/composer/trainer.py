"""The composer's trainer: TRL's GRPO, with self-distillation under hints and preference replay.

    trainer = ComposerReplicationTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=[reward],
        train_dataset=rows,          # prompt, and a hint where there is one
        dpo_pairs=pairs,             # state_messages, chosen, rejected
    )
    trainer.train()

Channel 1 is TRL's. Channel 2 goes through ``_generate_and_score_completions``: a rollout that went
wrong gets the teacher's context beside it, and is shuffled, split and buffered with the rest.
Channel 3 goes through ``_prepare_inputs``: its pairs are a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diloco_cloud.composer.channels import ChannelLoss, ReplayOptions, SDPOOptions, idle
from diloco_cloud.composer.checked_rewards import RewardGuard
from diloco_cloud.composer.evaluation_mode import evaluation_mode
from diloco_cloud.composer.hinted_rollouts import (
    LOSS_MASK,
    NUM_ITEMS,
    paired_turns,
    rollout_tensors,
)
from diloco_cloud.composer.losses import TAIDScheduler
from diloco_cloud.composer.losses.checks import has_keys
from diloco_cloud.composer.losses.logprobs import masked_sum
from diloco_cloud.composer.taid_progress import TAIDProgress
from diloco_cloud.composer.teacher_context import HintGenerator
from diloco_cloud.composer.trainer_base import (
    bare_model,
    check_arguments,
    checkpoint_folder,
    context_limit,
    find_hints,
    make_passes,
    make_prompt_filter,
    make_replay,
    prompt_encoder,
    reference_policy,
)
from diloco_cloud.composer.trainer_counts import CountingTrainer

_NO_HINT = "no rollout with a hint"


class ComposerReplicationTrainer(CountingTrainer):
    """``trl.GRPOTrainer`` whose loss is ``grpo + alpha_sdpo * sdpo + beta_replay * replay``.

    A channel is on where its weight is above 0 **and** it was given data: hints for channel 2,
    pairs for channel 3. One that is on and can never fire is an error at the start; one that does
    not fire for a while is a warning with the reasons, and its counters are logged at every
    ``logging_steps`` (``composer/sdpo/active`` tokens, ``composer/replay/active`` pairs, …).

    Rows of the data set may have beside ``prompt``:

    - ``hint``: text that the teacher sees and the student does not;
    - ``error_kind`` and ``error_meta``: what the hint generator makes the hint from. A
      ``rollout_func`` may return ``hint``, ``error_kind`` and ``error_meta`` too.

    With ``hint_generator=`` and tools, a turn whose tool call failed gets a hint by the error.

    Args:
        *args: of GRPOTrainer.
        alpha_sdpo: weight of channel 2.
        beta_replay: weight of channel 3.
        sdpo_jsd_beta: 0 forward KL, 0.5 Jensen-Shannon, 1 reverse KL.
        sdpo_temperature: of both softmaxes in channel 2.
        sdpo_token_clip: ceiling of one token's divergence, in nats.
        replay_dpo_beta: DPO's inverse temperature.
        dpo_variant: "dpo", or "simpo", which needs no reference policy.
        sdpo_wrapper: "none", "taid" or "entropy_opd".
        taid_t: TAID's interpolation in [0, 1], the same all along. Assigning
            :attr:`taid_t` changes it. For "taid" only.
        taid_scheduler: gives ``t`` step by step instead of ``taid_t``; goes into checkpoints.
        simpo_beta: SimPO's scale.
        simpo_gamma: SimPO's target margin.
        entropy_opd_h_max: entropy in nats at which the gate is all forward KL; None for log V.
        entropy_opd_mode: "soft" or "paper".
        dpo_pairs: preference pairs, a data set or a list: ``state_messages`` (or ``prompt``),
            ``chosen``, ``rejected``.
        replay_batch_size: pairs per device and micro-batch; by default
            ``per_device_train_batch_size``.
        max_dpo_seq_len: tokens of a pair's prompt and response together.
        hint_generator: ``(error_kind, error_meta) -> hint or None``; by default
            :func:`diloco_cloud.composer.hints.dispatch`, for rows with an ``error_kind``.
        strict: whether a reward function's failure ends training, or is counted and skipped.
        **kwargs: of GRPOTrainer. There is no ``data_collator``: TRL makes its batches itself.

    Raises:
        MissingDependencyError: trl is not installed.
        ConfigError: a value out of its range, data that cannot be used, or a channel that is on
            and cannot fire.
    """

    reward_funcs: list[Any]
    train_dataset: Any
    eval_dataset: Any

    def __init__(
        self,
        *args: Any,
        alpha_sdpo: float = 0.1,
        beta_replay: float = 0.05,
        sdpo_jsd_beta: float = 0.5,
        sdpo_temperature: float = 1.0,
        sdpo_token_clip: float | None = None,
        replay_dpo_beta: float = 0.1,
        dpo_variant: str = "dpo",
        sdpo_wrapper: str = "none",
        taid_t: float | None = None,
        taid_scheduler: TAIDScheduler | None = None,
        simpo_beta: float = 2.0,
        simpo_gamma: float = 1.0,
        entropy_opd_h_max: float | None = None,
        entropy_opd_mode: str = "soft",
        dpo_pairs: Iterable[Mapping[str, Any]] | None = None,
        replay_batch_size: int | None = None,
        max_dpo_seq_len: int = 2048,
        hint_generator: HintGenerator | None = None,
        strict: bool = True,
        **kwargs: Any,
    ) -> None:
        check_arguments(
            kwargs,
            weights={"alpha_sdpo": alpha_sdpo, "beta_replay": beta_replay},
            counts={"replay_batch_size": replay_batch_size, "max_dpo_seq_len": max_dpo_seq_len},
            hint_generator=hint_generator,
        )
        self.alpha_sdpo, self.beta_replay = alpha_sdpo, beta_replay
        self._taid = TAIDProgress(taid_scheduler)
        self._sdpo_options = SDPOOptions(
            jsd_beta=sdpo_jsd_beta,
            temperature=sdpo_temperature,
            token_clip=sdpo_token_clip,
            wrapper=sdpo_wrapper,  # type: ignore[arg-type]  # checked there
            taid_t=self._taid.start(taid_t, sdpo_wrapper),
            entropy_opd_h_max=entropy_opd_h_max,
            entropy_opd_mode=entropy_opd_mode,  # type: ignore[arg-type]
        )
        self._replay_options = ReplayOptions(
            variant=dpo_variant,  # type: ignore[arg-type]
            dpo_beta=replay_dpo_beta,
            simpo_beta=simpo_beta,
            simpo_gamma=simpo_gamma,
        )
        super().__init__(*args, **kwargs)
        self._has_new_adapter = kwargs.get("peft_config") is not None
        self.rewards = RewardGuard(strict=strict)
        self.reward_funcs = self.rewards.wrap_all(self.reward_funcs, self.reward_func_names)
        self._begin_counting()
        self._rollouts: tuple[Any, Any] = ([], [])
        self.policy_clock: Callable[[], int] = lambda: int(self.state.global_step)
        self.policy_version = 0
        bare = bare_model(self)
        self._passes = make_passes(self, bare)
        limit, encoder = context_limit(bare), prompt_encoder(self)
        self._prompts = make_prompt_filter(self, encoder, limit)
        self.train_dataset = self._prompts.fitting(self.train_dataset)
        self.eval_dataset = self._prompts.fitting(self.eval_dataset)
        self._hints = find_hints(self, encoder, limit, hint_generator)
        self._replay = make_replay(
            self,
            dpo_pairs,
            self._replay_options,
            batch_size=replay_batch_size,
            max_length=max_dpo_seq_len if limit is None else min(max_dpo_seq_len, limit),
        )

    @property
    def taid_t(self) -> float | None:
        """TAID's interpolation in force."""
        return self._sdpo_options.taid_t

    @taid_t.setter
    def taid_t(self, value: float) -> None:
        self._sdpo_options = replace(self._sdpo_options, taid_t=value)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """See ``transformers.Trainer``; a data set given here is checked as the constructor's is.

        Raises:
            ConfigError: the data set cannot be used.
        """
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self._prompts.fitting(eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    @property
    def prompts_skipped(self) -> int:
        """Prompts that leave no room for a completion, in all data sets so far."""
        return self._prompts.skipped

    # -- before training -----------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train; see ``transformers.Trainer.train``.

        The reference policy of channel 3 is the model as it is now, before a checkpoint, an outer
        loop or a step changes it; what a checkpoint to resume from knows of it goes first.
        """
        self._micro_batches_done = 0
        if self._replay is not None:
            if resume_from_checkpoint:
                found = checkpoint_folder(resume_from_checkpoint, self.args.output_dir)
                self._replay.reference.load(found)
            self.complete_reference()
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    @torch.no_grad()
    def complete_reference(self) -> None:
        """Compute the reference log-probabilities of pairs that have none yet."""
        if self._replay is None:
            return
        model = self.accelerator.unwrap_model(self.model)
        policy = reference_policy(model, has_new_adapter=self._has_new_adapter)
        with evaluation_mode(self.model), policy, self.accelerator.autocast():
            self._replay.complete_reference(self._score_pairs, self.accelerator.device)

    def _score_pairs(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        sums = [
            self._sequence_logprobs(
                self.model, inputs[f"dpo_{side}_input_ids"], inputs[f"dpo_{side}_response_mask"]
            )
            for side in ("chosen", "rejected")
        ]
        return sums[0], sums[1]

    # -- where the channels' inputs come from --------------------------------------------------

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        # Here all is at hand that channel 2 needs: prompts as the environments left them, and
        # completions as messages.
        self._rollouts = (prompts, completions)
        rewards: torch.Tensor = super()._calculate_rewards(
            inputs, prompts, completions, completion_ids_list
        )
        self.rewards.check_models(rewards, self.reward_funcs, self.reward_func_names)
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self.model.training:
            self.policy_version = self.policy_clock()
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self._hints is not None:
            self._hints.skipped.clear()
            added = rollout_tensors(self._hints, inputs, *self._rollouts, batch)
            if self.model.training:
                self._figures.skip("sdpo", self._hints.skipped)
            if not self.model.training:  # Else a step's tokens are known once they are shuffled.
                added[NUM_ITEMS] = self.accelerator.gather(added[LOSS_MASK].sum()).sum().clamp(1)
            batch.update(added)
        return batch

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        # TRL buffers its dictionary and hands it out again in the next iteration.
        inputs = dict(inputs)
        done, size = self._micro_batches_done, self._micro_batches
        if self._hints is not None:
            index = self._step % self.args.steps_per_generation
            inputs[NUM_ITEMS] = self._step_tokens.of(self._buffered_inputs, index, done, size)
        if self._replay is not None:
            # A resumed trainer draws what it would have drawn.
            number = self.state.global_step * self.args.gradient_accumulation_steps + done
            inputs |= self._replay.batch(number, self.accelerator.device)
        self._micro_batches_done = (done + 1) % size
        return inputs

    # -- the loss ------------------------------------------------------------------------------

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        self._figures.add_mean("grpo/loss", loss.detach() * self._micro_batches, self._mode)
        if self.model.training:
            self.tokens_trained += int(
                inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()
            )
        if self._hints is not None:
            loss = loss + self.alpha_sdpo * self._compute_sdpo_loss(model, inputs)
        if self._replay is not None and self.model.training:
            loss = loss + self.beta_replay * self._compute_trace_replay_loss(model, inputs)
        return loss

    def _compute_sdpo_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """Channel 2 of a micro-batch, not weighted: its part of the accumulated step's mean.

        The mean is over the hinted tokens of the step, in all its micro-batches and processes: how
        they fall into these makes no difference to the gradient.
        """
        found = self._distill(model, inputs)
        loss, active = self._count("sdpo", found)
        if self.model.training:
            ends_step = self.accelerator.sync_gradients
            t = self._taid.follow(loss, active, self.state.global_step, ends_step=ends_step)
            if t is not None:
                self.taid_t = t
        return found.loss

    def _distill(self, model: nn.Module, inputs: dict[str, Any]) -> ChannelLoss:
        several = self.accelerator.num_processes > 1
        has_keys(inputs, NUM_ITEMS)
        turns = paired_turns(inputs, self._tokenizer.pad_token_id, at_least_one=several)
        if turns is None:
            return idle(_NO_HINT, like=inputs[LOSS_MASK])
        # The processes' gradients are averaged, so each divides its sum by its share.
        num_items = inputs[NUM_ITEMS] / self.accelerator.num_processes
        found = self._passes.distill(model, *turns, self._sdpo_options, num_items=num_items)
        # The row that stood in for a hinted one was not left out.
        return found if found.active else replace(found, idle=_NO_HINT, skipped=0)

    def _compute_trace_replay_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """Channel 3 of a micro-batch, not weighted: its part of the accumulated step's mean."""
        found = self._passes.replay(model, inputs, self._replay_options)
        self._count("replay", found)
        return found.loss / self._micro_batches

    def _sequence_logprobs(
        self, model: nn.Module, input_ids: torch.Tensor, response_mask: torch.Tensor
    ) -> torch.Tensor:
        """Log-probability of each sequence's response, summed over its tokens: (B,)."""
        return masked_sum(*self._passes.response_logprobs(model, input_ids, response_mask))

    # -- logs and checkpoints ------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log TRL's figures and the channels'."""
        if self.model.training and self.taid_t is not None:
            logs["composer/sdpo/taid_t"] = self.taid_t
        super().log(logs, start_time)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if not self.args.should_save:
            return
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        if self._replay is not None:
            self._replay.reference.save(folder)
        self._taid.save(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        t = None if checkpoint is None else self._taid.load(Path(checkpoint))
        if t is not None:
            self.taid_t = t
