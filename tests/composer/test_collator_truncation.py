"""What goes where a trace does not fit: whole turns, and never the error turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from chats import a_trace, chat_tokenizer, marked
from hypothesis import given
from hypothesis import strategies as st

from diloco_cloud.composer.collator import CollatorConfig, ComposerDataCollator
from diloco_cloud.composer.trace import TraceTurn
from diloco_cloud.composer.truncation import keep_turns
from diloco_cloud.errors import ConfigError

TOKENIZER = chat_tokenizer("smollm2")
HINT = "Look first."


def _turns(roles: str, **errors: str) -> list[TraceTurn]:
    """Turns of `s`, `u`, `a`, `t`; the third is `turn 2`."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    turns: list[TraceTurn] = [
        {"role": names[role], "content": f"turn {i}"} for i, role in enumerate(roles)
    ]
    return turns


def _collator(room: int) -> ComposerDataCollator:
    config = CollatorConfig(max_seq_len=room, hint_generator=lambda kind, meta: HINT)
    return ComposerDataCollator(TOKENIZER, config)


def _length(turns: list[TraceTurn], **config: Any) -> int:
    made = ComposerDataCollator(TOKENIZER, CollatorConfig(**config))([a_trace(turns=turns)])
    return max(
        made["input_ids"].size(1), made.get("ctx_teacher_input_ids", made["input_ids"]).size(1)
    )


def _kept(batch: dict[str, Any], row: int = 0) -> list[int]:
    text = TOKENIZER.decode(batch["input_ids"][row])
    return [int(part.partition("<|im_end|>")[0]) for part in text.split("turn ")[1:]]


@pytest.mark.parametrize(
    ("roles", "first", "last", "room", "kept"),
    [
        ("ua", 1, 1, 2, [0, 1]),
        ("uau", 1, 1, 2, [0, 1]),  # what follows the last answer is nobody's context
        ("sua", 2, 2, 2, None),
        ("uauaua", 5, 5, 4, [2, 3, 4, 5]),  # an exchange at a time
        ("uauaua", 5, 5, 3, [4, 5]),
        ("suauaua", 6, 6, 5, [0, 3, 4, 5, 6]),  # the system turn stays
        ("uatatata", 7, 7, 5, [0, 5, 6, 7]),  # the question stays, a call goes with its result
        ("uuatata", 6, 6, 3, [0, 1, 6]),
        ("uatauata", 3, 3, 3, [0, 3]),  # the newest last, back to the error turn
        ("uatauata", 3, 3, 5, [0, 3, 4, 5]),
        ("uatauata", 1, 5, 5, None),
    ],
)
def test_keep_turns_drops_whole_turns_and_the_oldest_first(
    roles: str, first: int, last: int, room: int, kept: list[int] | None
) -> None:
    def fits(indices: Sequence[int]) -> bool:
        return len(indices) <= room

    for bound in (0, 1):  # a lower bound that tells nothing, and one that tells all
        least = [bound] * len(roles)
        turns = _turns(roles)
        assert keep_turns(turns, first, last, least=least, room=room, fits=fits) == kept


@given(data=st.data())
def test_keep_turns_keeps_as_many_as_fit(data: st.DataObject) -> None:
    roles = data.draw(st.from_regex(r"s?u(u?a[tu]{0,2}){1,8}", fullmatch=True))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(roles), max_size=len(roles)))
    answers = [i for i, role in enumerate(roles) if role == "a"]
    first, last = sorted(data.draw(st.tuples(st.sampled_from(answers), st.sampled_from(answers))))
    room = data.draw(st.integers(0, sum(sizes)))

    def fits(indices: Sequence[int]) -> bool:
        return sum(sizes[i] for i in indices) <= room

    least = [data.draw(st.integers(0, size)) for size in sizes]
    turns = _turns(roles)
    kept = keep_turns(turns, first, last, least=least, room=room, fits=fits)
    unbound = keep_turns(turns, first, last, least=[0] * len(roles), room=room, fits=fits)
    assert kept == unbound
    if kept is None:
        opening = max(i for i in range(first) if roles[i] == "u" and roles[i - 1 : i] != "u")
        assert sum(sizes[first : last + 1]) + sizes[opening] + sizes[0] * (roles[0] == "s") > (
            room - sum(size for size, role in zip(sizes, roles, strict=True) if role == "u")
        )
        return
    assert fits(kept)
    assert set(range(first, last + 1)) <= set(kept)
    assert kept == sorted(kept)
    assert roles[kept[-1]] == "a"
    body = "".join(roles[i] for i in kept).removeprefix("s")
    assert body[0] == "u"
    assert (roles[0] == "s") == (kept[0] == 0 and roles[kept[0]] == "s")


def test_collator_keeps_all_where_all_fits() -> None:
    turns = _turns("uauaua")
    room = _length(turns)
    collator = _collator(room)
    assert _kept(collator([a_trace(turns=turns)])) == [0, 1, 2, 3, 4, 5]
    assert not collator.skipped
    smaller = _collator(room - 1)
    assert _kept(smaller([a_trace(turns=turns)])) == [2, 3, 4, 5]
    assert smaller.skipped == Counter(turns_dropped=2)


@pytest.mark.parametrize("wrong", [1, 3, 5])
def test_collator_keeps_the_error_turn(wrong: int) -> None:
    turns = _turns("uatatatatata")
    turns[wrong]["tool_error"] = "runtime_error"
    alone = _length([turns[0], turns[wrong]], hint_generator=lambda kind, meta: HINT)
    collator = _collator(alone)
    batch = collator([a_trace(turns=turns)])
    assert _kept(batch) == [0, wrong]
    assert marked(TOKENIZER, batch["input_ids"][0], batch["sdpo_student_mask"][0]) == (
        f"turn {wrong}<|im_end|>"
    )
    assert HINT in TOKENIZER.decode(batch["ctx_teacher_input_ids"][0])
    assert collator.skipped == Counter(turns_dropped=10)
    # One token less, and there is room for the turn but not for its hint: channel 1 goes on.
    tight = _collator(alone - 1)
    batch = tight([a_trace(turns=turns)])
    assert "sdpo_loss_mask" not in batch
    assert tight.skipped["error_turn_too_long"] == 1
    assert _kept(batch)[-1] == 11


def test_collator_gives_up_the_older_of_two_errors() -> None:
    turns = _turns("uatatatatata")
    for wrong in (1, 9):
        turns[wrong]["tool_error"] = "runtime_error"
    collator = _collator(_length(turns[:6], hint_generator=lambda kind, meta: HINT))
    batch = collator([a_trace(turns=turns)])
    assert marked(TOKENIZER, batch["input_ids"][0], batch["sdpo_student_mask"][0]) == (
        "turn 9<|im_end|>"
    )
    assert collator.skipped["error_turn_too_long"] == 1
    assert batch["ctx_teacher_input_ids"].size(1) <= collator.config.max_seq_len


def test_collator_keeps_the_older_error_where_only_that_fits() -> None:
    turns = _turns("uatata")
    for wrong in (1, 3):
        turns[wrong]["tool_error"] = "runtime_error"
    turns[3]["content"] = "much too long " * 50
    collator = _collator(96)
    batch = collator([a_trace(turns=turns)])
    assert marked(TOKENIZER, batch["input_ids"][0], batch["sdpo_student_mask"][0]) == (
        "turn 1<|im_end|>"
    )
    assert collator.skipped["error_turn_too_long"] == 1


def test_collator_leaves_out_an_example_that_cannot_fit() -> None:
    long = a_trace(turns=_turns("ua"), final_reward=9.0)
    long["turns"][0]["content"] = "much too long " * 50
    short = a_trace(turns=_turns("ua"))
    collator = _collator(96)
    assert not collator.fits(long)
    assert collator.fits(short)
    assert not collator.skipped
    batch = collator([long, short])
    assert batch["input_ids"].size(0) == 1
    assert batch["rewards"].tolist() == [0.5]
    assert collator.skipped == Counter(example_too_long=1)
    with pytest.raises(ConfigError, match="none of the 2 examples of a batch fits 96") as error:
        collator([long, long])
    assert "max_seq_len" in (error.value.fix or "")


def test_pairs_lose_the_oldest_turns_of_their_state() -> None:
    state: list[Any] = _turns("suauau")
    pair = {"state_messages": state, "chosen": "yes", "rejected": "no, " * 10}
    whole = ComposerDataCollator(TOKENIZER).pairs([pair])
    room = whole["dpo_rejected_input_ids"].size(1) - 1
    collator = ComposerDataCollator(TOKENIZER, CollatorConfig(max_dpo_seq_len=room))
    batch = collator.pairs([pair])
    for side in ("chosen", "rejected"):  # the longer one decides for both
        text = TOKENIZER.decode(batch[f"dpo_{side}_input_ids"][0])
        assert [f"turn {i}" in text for i in range(6)] == [True, False, False, True, True, True]
    assert not collator.skipped
