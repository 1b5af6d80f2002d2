"""For any conversation, student and teacher are compared on the same words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from chats import TEMPLATES, chat_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco_cloud.composer.collator import CollatorConfig, ComposerDataCollator
from diloco_cloud.composer.trace import TraceTurn

#: Llama 2 refuses to be asked about what a tool returned, and so do its traces.
CHOSEN = sorted(TEMPLATES.keys() - {"llama2"})
WORDS = st.text(
    st.characters(codec="utf-8", exclude_characters="<>", exclude_categories=["Cc", "Cs"])
    | st.sampled_from(" \n\t"),
    min_size=1,
    max_size=20,
).filter(str.strip)
CALLS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["Read", "Edit"]),
        "arguments": st.dictionaries(st.sampled_from(["path", "to"]), WORDS)
        | st.sampled_from(['{"path": ', "a.py", "{'path': 1}"]),
    }
)


@st.composite
def _turns(draw: st.DrawFn) -> list[TraceTurn]:
    """A session: questions, answers with and without thinking and calls, results, errors."""
    turns: list[Any] = []
    if draw(st.booleans()):
        turns.append({"role": "system", "content": draw(WORDS)})
    for _ in range(draw(st.integers(1, 3))):
        turns.append({"role": "user", "content": draw(WORDS)})
        for _ in range(draw(st.integers(0, 2))):
            turns.append(_answer(draw) | {"tool_call": draw(CALLS)})
            result = {"role": "tool", "content": draw(WORDS)}
            wrong = draw(st.booleans())
            turns.append(result | ({"tool_error": f"E{len(turns)}"} if wrong else {}))
        wrong = draw(st.booleans())
        turns.append(_answer(draw) | ({"tool_error": f"E{len(turns)}"} if wrong else {}))
    return turns


def _answer(draw: st.DrawFn) -> dict[str, Any]:
    thinking = f"<think>\n{draw(WORDS).strip()}\n</think>\n\n" if draw(st.booleans()) else ""
    return {"role": "assistant", "content": thinking + draw(WORDS)}


def _hint(kind: str, meta: Any) -> str:
    return f"HINT {kind}."


def _error_turns(turns: list[TraceTurn]) -> dict[int, str]:
    """Independently of the collator: the assistant turn behind each error, and its hint."""
    author, hints = 0, {}
    for i, turn in enumerate(turns):
        author = i if turn["role"] == "assistant" else author
        if "tool_error" in turn:
            hints[author] = _hint(str(turn["tool_error"]), None)
    return hints


@pytest.mark.parametrize("template", CHOSEN)
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(turns=_turns())
def test_student_and_teacher_are_aligned(template: str, turns: list[TraceTurn]) -> None:
    tokenizer = chat_tokenizer(template)
    collator = ComposerDataCollator(tokenizer, CollatorConfig(hint_generator=_hint))
    batch = collator([{"trace_id": "t", "turns": turns, "final_reward": 1.0}])
    student = batch["input_ids"][0]
    answers = [str(turn["content"]) for turn in turns if turn["role"] == "assistant"]
    _says(tokenizer.decode(student[batch["response_mask"][0].bool()]), answers)
    hints = _error_turns(turns)
    assert ("sdpo_loss_mask" in batch) == bool(hints)
    if not hints:
        return
    teacher = batch["ctx_teacher_input_ids"][0]
    at_student, at_teacher = batch["sdpo_student_mask"][0], batch["sdpo_loss_mask"][0]
    assert torch.equal(student[at_student.bool()], teacher[at_teacher.bool()])
    assert not (at_student & ~batch["response_mask"][0]).any()
    _says(tokenizer.decode(teacher[at_teacher.bool()]), [str(turns[i]["content"]) for i in hints])
    # The hints are all that the teacher knows more, up to the last turn it is asked about.
    text = tokenizer.decode(teacher)
    for hint in hints.values():
        assert text.count(hint) == 1
        text = text.replace(hint, "")
    ends = [mask.nonzero()[-1].item() + 1 for mask in (at_student, at_teacher)]
    assert ends[1] == len(teacher)
    assert _words(text) == _words(tokenizer.decode(student[: ends[0]]))


@pytest.mark.parametrize("template", ["smollm2", "qwen3"])
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(turns=_turns(), room=st.integers(16, 400))
def test_alignment_survives_truncation(template: str, turns: list[TraceTurn], room: int) -> None:
    tokenizer = chat_tokenizer(template)
    config = CollatorConfig(max_seq_len=room, hint_generator=_hint)
    collator = ComposerDataCollator(tokenizer, config)
    short: list[TraceTurn] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    if not collator.fits({"turns": short, "final_reward": 0.0}):
        return
    batch = collator([{"turns": t, "final_reward": 0.0} for t in (turns, short)])
    assert batch["input_ids"].size(0) + collator.skipped["example_too_long"] == 2
    assert batch["input_ids"].size(1) <= room
    hints = _error_turns(turns)
    lost = collator.skipped["error_turn_too_long"]
    assert lost <= len(hints)
    assert ("sdpo_loss_mask" in batch) == (lost < len(hints))
    if "sdpo_loss_mask" not in batch:
        return
    assert batch["ctx_teacher_input_ids"].size(1) <= room
    student = batch["input_ids"][batch["sdpo_student_mask"].bool()]
    assert torch.equal(student, batch["ctx_teacher_input_ids"][batch["sdpo_loss_mask"].bool()])
    assert tokenizer.decode(batch["ctx_teacher_input_ids"][0]).count("HINT") == len(hints) - lost


def _says(text: str, contents: list[str]) -> None:
    """What was said comes in this order; templates differ in the space around it."""
    position = 0
    for content in contents:
        answer = content.rpartition("</think>")[2].strip()
        position = text.index(answer, position) + len(answer)


def _words(text: str) -> str:
    """Without space: some templates trim what they are given, or write results as JSON."""
    return re.sub(r"\s|\\n", "", text)
