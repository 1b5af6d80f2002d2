"""A small batch for all three channels, made with a real tokenizer: for smoke tests and examples.

The student asks a tool for something, badly; the teacher reads the same answer after a hint. The
texts are fixed; only the reference log-probabilities, which are dummies, come from the seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco_cloud.errors import ConfigError

Message = dict[str, str]
#: Ids of a sequence, and how many of them, at its end, are the response.
_Encoded = tuple[list[int], int]


@dataclass(frozen=True)
class _Exercise:
    """One question, what the student answers, the hint that would have helped, and a better one."""

    question: str
    attempt: str
    hint: str
    better: str


_EXERCISES: Mapping[str, Sequence[_Exercise]] = {
    "factorial": (
        _Exercise(
            "Write factorial(n) in Python.",
            "def factorial(n):\n    return n * factorial(n - 1)",
            "Hint: the last call ended in RecursionError. Give the recursion an end.",
            "def factorial(n):\n    return 1 if n < 2 else n * factorial(n - 1)",
        ),
        _Exercise(
            "Compute 5! with your function and print it.",
            "print(factorial('5'))",
            "Hint: the last call ended in TypeError. The argument must be an integer.",
            "print(factorial(5))",
        ),
    ),
    "binary_search": (
        _Exercise(
            "Write find(items, x) for a sorted list, by halving it.",
            "def find(items, x):\n    return items.index(x)",
            "Hint: the answer must not look at every item. Compare x with the middle one.",
            "def find(items, x):\n    lo, hi = 0, len(items)\n    while lo < hi:\n"
            "        mid = (lo + hi) // 2\n        if items[mid] < x:\n            lo = mid + 1\n"
            "        else:\n            hi = mid\n    return lo",
        ),
        _Exercise(
            "Where is 7 in [1, 3, 7, 9]? Use find.",
            "find(7, [1, 3, 7, 9])",
            "Hint: the last call ended in TypeError. The list comes first.",
            "find([1, 3, 7, 9], 7)",
        ),
    ),
}


def build_batch(
    tokenizer: Any,
    *,
    device: torch.device | str = "cpu",
    seed: int = 42,
    variant: str = "factorial",
    align_sdpo_shapes: bool = False,
) -> dict[str, Tensor]:
    """A batch with every input of :func:`compose_loss`, formatted by the tokenizer's template.

    Args:
        tokenizer: has ``apply_chat_template`` and can be called on text, as Hugging Face's.
        device: of all tensors.
        seed: given to ``torch.manual_seed``; the dummy reference log-probabilities come from it.
        variant: ``"factorial"`` or ``"binary_search"``.
        align_sdpo_shapes: cut the teacher's rows at their beginning to the student's length. Both
            end in the same answer, so its tokens are at the same positions then and channel 2
            fires; without, the teacher's rows are longer by the hint and it does not.

    Returns:
        ``input_ids``, ``response_mask`` (2, T_s); ``ctx_teacher_input_ids``, ``sdpo_loss_mask``
        (2, T_t); ``dpo_chosen_input_ids``, ``dpo_chosen_response_mask`` (2, T_c) and the same of
        ``dpo_rejected`` (2, T_r), of int64, padded on the right; ``dpo_chosen_ref_logprobs`` and
        ``dpo_rejected_ref_logprobs`` (2,), dummies that no policy gave.

    Raises:
        ConfigError: (a ``ValueError``) an unknown variant, or a tokenizer without chat template.
    """
    if variant not in _EXERCISES:
        raise ConfigError(
            f"there is no batch {variant!r}", fix=f"Use one of {', '.join(_EXERCISES)}."
        )
    torch.manual_seed(seed)
    exercises = _EXERCISES[variant]
    student = [_encode(tokenizer, [_user(e.question)], e.attempt) for e in exercises]
    teacher = [
        _encode(tokenizer, [_user(f"{e.question}\n\n{e.hint}")], e.attempt) for e in exercises
    ]
    chosen = [_encode(tokenizer, [_user(e.question)], e.better) for e in exercises]
    if align_sdpo_shapes:
        teacher = [
            (ids[len(ids) - len(own) :], answer)
            for (ids, answer), (own, _) in zip(teacher, student, strict=True)
        ]
    pad = getattr(tokenizer, "pad_token_id", None) or 0
    batch = {
        **_padded(student, pad, "input_ids", "response_mask"),
        **_padded(teacher, pad, "ctx_teacher_input_ids", "sdpo_loss_mask"),
        **_padded(chosen, pad, "dpo_chosen_input_ids", "dpo_chosen_response_mask"),
        **_padded(student, pad, "dpo_rejected_input_ids", "dpo_rejected_response_mask"),
        "dpo_chosen_ref_logprobs": _dummy_logprobs(chosen),
        "dpo_rejected_ref_logprobs": _dummy_logprobs(student),
    }
    return {key: tensor.to(device) for key, tensor in batch.items()}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _encode(tokenizer: Any, prompt: list[Message], answer: str) -> _Encoded:
    # The answer apart from the prompt, so that its tokens do not depend on what precedes it.
    try:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    except (AttributeError, ValueError) as error:
        raise ConfigError(
            f"the tokenizer cannot format a conversation: {error}",
            fix="Use an instruction-tuned model's tokenizer, or set tokenizer.chat_template.",
        ) from error
    end = getattr(tokenizer, "eos_token", None) or ""
    before = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    own = list(tokenizer(answer + end, add_special_tokens=False)["input_ids"])
    return before + own, len(own)


def _padded(rows: Sequence[_Encoded], pad: int, ids_key: str, mask_key: str) -> dict[str, Tensor]:
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), longest), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (own, answer) in enumerate(rows):
        ids[row, : len(own)] = torch.tensor(own)
        mask[row, len(own) - answer : len(own)] = 1
    return {ids_key: ids, mask_key: mask}


def _dummy_logprobs(rows: Sequence[_Encoded]) -> Tensor:
    """Some two nats for each token of the answer."""
    lengths = torch.tensor([float(answer) for _, answer in rows])
    return -lengths * (1.5 + torch.rand(len(rows)))
