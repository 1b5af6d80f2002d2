"""Channel 2's tensors for a generation batch: the teacher's contexts, and which tokens count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from diloco_cloud.composer.encoding import Prompt
from diloco_cloud.composer.losses.checks import has_keys, token_mask
from diloco_cloud.composer.teacher_context import HintedTurn, Hints, own_turns
from diloco_cloud.composer.turns import Turns

CONTEXT_IDS = "ctx_teacher_prompt_ids"
CONTEXT_MASK = "ctx_teacher_prompt_mask"
LOSS_MASK = "sdpo_loss_mask"
NUM_ITEMS = "sdpo_num_items"


def rollout_tensors(
    hints: Hints,
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[Prompt],
    completions: Sequence[Any],
    batch: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """What is added to TRL's batch; dimension 0 is the rollouts', so it can be split with them.

    Args:
        hints: finds the turns.
        rows: of the data set, one for each rollout.
        prompts: of the rollouts.
        completions: their texts, or their messages.
        batch: TRL's, of which ``completion_ids``, ``completion_mask`` and ``tool_mask`` are read.

    Returns:
        ``ctx_teacher_prompt_ids`` and ``ctx_teacher_prompt_mask`` (B, P), padded on the left, and
        ``sdpo_loss_mask`` (B, T) over the completions; zero throughout where a row has no hint.
    """
    mask = batch["completion_mask"]
    if "tool_mask" in batch:
        mask = mask * batch["tool_mask"]
    turns = [
        hints.turn(row, prompt, completion, own_turns(own))
        for row, prompt, completion, own in zip(
            rows, prompts, completions, mask.tolist(), strict=True
        )
    ]
    return {**_contexts(turns, mask), LOSS_MASK: _loss_mask(turns, mask)}


def paired_turns(
    inputs: Mapping[str, torch.Tensor], pad_token_id: int, *, at_least_one: bool = False
) -> tuple[Turns, Turns] | None:
    """The student's and the teacher's side of a micro-batch's hinted turns, or None without any.

    Args:
        inputs: TRL's micro-batch with the tensors of :func:`rollout_tensors`.
        pad_token_id: fills the rows up.
        at_least_one: give a row that no token counts of rather than None: processes that share a
            sharded model must run it forward and back equally often.

    Raises:
        ConfigError: a tensor is missing, or a mask is not of its tokens' shape.
    """
    has_keys(inputs, "prompt_ids", "prompt_mask", "completion_ids")
    has_keys(inputs, CONTEXT_IDS, CONTEXT_MASK, LOSS_MASK)
    completions, mask = inputs["completion_ids"], inputs[LOSS_MASK]
    token_mask(mask, completions, LOSS_MASK)
    token_mask(inputs[CONTEXT_MASK], inputs[CONTEXT_IDS], CONTEXT_MASK)
    rows: list[int] = mask.any(dim=1).nonzero().flatten().tolist()
    dummy = not rows and at_least_one
    if not rows and not dummy:
        return None
    seen_by_student, seen_by_teacher, turns = [], [], []
    for row in rows or [0]:
        places = mask[row].nonzero().flatten()
        start, end = (0, 1) if dummy else (int(places[0]), int(places[-1]) + 1)
        prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row] != 0]
        seen_by_student.append(torch.cat([prompt, completions[row, :start]]))
        context = inputs[CONTEXT_IDS][row][inputs[CONTEXT_MASK][row] != 0]
        seen_by_teacher.append(prompt if dummy else context)
        turns.append(completions[row, start:end])
    student = Turns.flush_right(seen_by_student, turns, pad_token_id)
    teacher = Turns.flush_right(seen_by_teacher, turns, pad_token_id)
    if dummy:
        student.turn_mask.zero_()
    return student, teacher


class StepTokens:
    """How many hinted tokens an optimizer step learns from: what its sum over tokens is divided by.

    Its micro-batches are slices of generation batches that have been shuffled, so each step has a
    number of its own. A step that takes micro-batches of several generation batches would have to
    know what has not been generated yet: there, each batch has its share of the step's mean.

    Args:
        accelerator: gathers over processes, which must call in step.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._batches: Sequence[Mapping[str, torch.Tensor]] = ()
        self._counts: list[float] = []

    def of(
        self, batches: Sequence[Mapping[str, torch.Tensor]], index: int, done: int, size: int
    ) -> float:
        """Hinted tokens of the step, over all processes; 1 for a step that has none.

        Args:
            batches: the generation batch's micro-batches.
            index: of the one that is due.
            done: micro-batches that the step has taken before it.
            size: micro-batches of the step.
        """
        if batches is not self._batches:
            counts = torch.stack([batch[LOSS_MASK].sum() for batch in batches])
            rows = self._accelerator.gather(counts).view(-1, len(batches))
            self._batches, self._counts = batches, rows.sum(dim=0).tolist()
        own = self._counts[max(0, index - done) : index - done + size]
        return max(1.0, sum(own) * size / len(own))


def _contexts(turns: Sequence[HintedTurn | None], like: torch.Tensor) -> dict[str, torch.Tensor]:
    contexts = [() if turn is None else turn.context for turn in turns]
    width = max(1, *map(len, contexts))
    ids = like.new_zeros((len(turns), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, context in enumerate(contexts):
        if context:
            ids[row, width - len(context) :] = torch.tensor(context)
            mask[row, width - len(context) :] = 1
    return {CONTEXT_IDS: ids, CONTEXT_MASK: mask}


def _loss_mask(turns: Sequence[HintedTurn | None], completion_mask: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros_like(completion_mask)
    for row, turn in enumerate(turns):
        if turn is not None:
            mask[row, turn.start : turn.end] = 1
    return mask
