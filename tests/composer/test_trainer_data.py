"""Where channels 2 and 3 get their rows from, without a model."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset

from diloco_cloud.composer.encoding import PromptEncoder
from diloco_cloud.composer.hints import dispatch
from diloco_cloud.composer.preference_pairs import PairSet, PairStream
from diloco_cloud.composer.replay import Replay
from diloco_cloud.composer.teacher_context import Hints, own_turns
from diloco_cloud.composer.trainer_base import find_hints
from diloco_cloud.composer.turns import Turns
from diloco_cloud.errors import ConfigError


def by_kind(kind: str, meta: dict[str, Any]) -> str | None:
    return f"hint : {kind}" if kind != "ignored" else None


@pytest.fixture
def hints() -> Hints:
    return Hints(PromptEncoder(tiny.tokenizer()), by_kind, 60, reads_tool_errors=True)


QUESTION = [{"role": "user", "content": "w1"}]


def test_own_turns_are_the_runs_of_ones() -> None:
    assert own_turns([1, 1, 0, 0, 1, 0]) == [(0, 2), (4, 5)]
    assert own_turns([0, 0]) == []


def test_hints_of_a_row_are_for_its_first_turn(hints: Hints) -> None:
    reply = [{"role": "assistant", "content": "w2"}]
    turn = hints.turn({"hint": "hint : w9"}, QUESTION, reply, [(0, 2)])
    assert turn is not None
    assert (turn.start, turn.end) == (0, 2)
    text = hints.encoder.tokenizer.decode(turn.context)
    assert text == "<start> user w1 hint : w9 <eos> <start> assistant"
    assert hints.turn({"hint": None}, QUESTION, reply, [(0, 2)]) is None
    assert hints.of_row({"error_kind": "w4"}) == "hint : w4"
    assert hints.of_row({"error_kind": "ignored"}) is None


def test_hints_of_a_data_set_say_what_their_own_row_says() -> None:
    """Arrow gives every row's schema the keys of all rows' schemas."""
    schemas = [
        {"type": "object", "properties": {"path": {"type": "string"}}},
        {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    ]
    rows = [
        {"error_kind": "type_error", "error_meta": {"tool_name": "w1", "tool_schema": schema}}
        for schema in schemas
    ]
    hints = Hints(PromptEncoder(tiny.tokenizer()), dispatch, None)
    found = [hints.of_row(row) for row in Dataset.from_list(rows)]
    assert found == [hints.of_row(row) for row in rows]
    assert "null" not in str(found)


def test_hints_of_a_row_whose_error_meta_is_text_are_refused(hints: Hints) -> None:
    with pytest.raises(ConfigError, match="error_meta of a row is str 'boom'"):
        hints.of_row({"error_kind": "w4", "error_meta": "boom"})


def test_pairs_of_a_data_set_are_encoded_as_written() -> None:
    """Arrow fills up what a turn, or the arguments of its tool call, does not have."""
    call = {"type": "function", "function": {"name": "w1", "arguments": {"w2": "w3"}}}
    states = [
        [{"role": "user", "content": "w1"}],
        [
            {"role": "user", "content": "w1"},
            {"role": "assistant", "content": "w4", "tool_calls": [call]},
            {"role": "tool", "content": "w5"},
        ],
    ]
    rows = [{"state_messages": state, "chosen": "w2", "rejected": "w3"} for state in states]
    encoder = PromptEncoder(tiny.tokenizer())
    written = PairSet.encode(rows, encoder, max_length=60).pairs
    assert PairSet.encode(Dataset.from_list(rows), encoder, max_length=60).pairs == written


def test_hints_of_plain_text_come_before_it(hints: Hints) -> None:
    turn = hints.turn({"hint": "hint : w9"}, "w1 w2", "w3", [(0, 1)])
    assert turn is not None
    assert hints.encoder.tokenizer.decode(turn.context) == "hint : w9 w1 w2"


def test_hints_find_the_turn_whose_tool_call_failed(hints: Hints) -> None:
    completion = [
        {"role": "assistant", "content": "w2"},
        {"role": "tool", "name": "w3", "content": "w4"},
        {"role": "assistant", "content": "w5"},
        {"role": "tool", "name": "w3", "content": "{'error': 'Tool w3 not found.'}"},
        {"role": "assistant", "content": "w6"},
    ]
    spans = own_turns([1, 1, 0, 1, 1, 1, 0, 1])
    turn = hints.turn({}, QUESTION, completion, spans)
    assert turn is not None
    assert (turn.start, turn.end) == spans[1]
    text = hints.encoder.tokenizer.decode(turn.context, skip_special_tokens=False)
    assert "user w1" in text
    assert "tool w4 hint :" in text
    assert "w5" not in text
    hints.reads_tool_errors = False
    assert hints.turn({}, QUESTION, completion, spans) is None


def test_hints_of_rows_are_read_with_environments_too() -> None:
    trainer = SimpleNamespace(
        alpha_sdpo=0.5,
        tools=None,
        environment_factories={None: object},
        _env_tools={None: []},
        train_dataset=tiny.rows(),
        rollout_func=None,
        processing_class=tiny.tokenizer(),
    )
    found = find_hints(trainer, PromptEncoder(tiny.tokenizer()), None, None)
    assert found is not None
    assert [bool(found.of_row(row)) for row in tiny.rows(2)] == [False, True]


def test_hints_count_what_they_cannot_use(hints: Hints) -> None:
    row = {"hint": "w1 " * 80}
    assert hints.turn(row, QUESTION, "w2", [(0, 1)]) is None
    assert hints.turn(row, QUESTION, "w2", []) is None
    assert hints.skipped == {"contexts that are too long": 1, "rollouts that are masked": 1}


def test_turns_of_different_contexts_line_up() -> None:
    turn = torch.tensor([7, 8, 9])
    student = Turns.flush_right([torch.tensor([1, 2]), torch.tensor([1])], [turn, turn[:1]], 0)
    teacher = Turns.flush_right([torch.tensor([1, 2, 3, 4])] * 2, [turn, turn[:1]], 0)
    assert student.input_ids.tolist() == [[1, 2, 7, 8, 9], [0, 0, 0, 1, 7]]
    assert student.attention_mask.tolist() == [[1] * 5, [0, 0, 0, 1, 1]]
    assert torch.equal(student.turn_mask, teacher.turn_mask)
    assert torch.equal(
        student.input_ids[:, -3:][student.turn_mask != 0],
        teacher.input_ids[:, -3:][teacher.turn_mask != 0],
    )


def test_pairs_are_encoded_as_prompt_and_what_ends_a_turn() -> None:
    tokenizer = tiny.tokenizer()
    encoder = PromptEncoder(tokenizer)
    (pair,) = PairSet.encode(tiny.pairs(1), encoder, max_length=64).pairs
    assert tokenizer.decode(pair.prompt) == "<start> user w0 w2 <eos> <start> assistant"
    assert tokenizer.decode(pair.chosen) == "w1 w5 <eos>"
    assert tokenizer.decode(pair.rejected) == "w2 w6 w7 <eos>"
    trl_form = {
        "prompt": [{"role": "user", "content": "w0 w2"}],
        "chosen": [{"role": "assistant", "content": "w1 w5"}],
        "rejected": [{"role": "assistant", "content": "w2 w6 w7"}],
    }
    assert PairSet.encode([trl_form], encoder, max_length=64).pairs == (pair,)


def test_pairs_are_written_as_the_rollouts_prompts_are() -> None:
    template = "{{ 'w9 ' if not think }}{{ tools[0]['name'] if tools }} " + tiny.CHAT_TEMPLATE
    encoder = PromptEncoder(tiny.tokenizer(), [{"name": "w8"}], template, {"think": True})
    (row,) = tiny.pairs(1)
    (pair,) = PairSet.encode([row], encoder, max_length=64).pairs
    assert list(pair.prompt) == encoder.prompt_ids(row["state_messages"])
    assert tiny.tokenizer().decode(pair.prompt).startswith("w8 <start> user w0")


def test_pair_stream_passes_over_all_pairs_and_shares_them() -> None:
    streams = [PairStream(10, 2, seed=1, process=p, processes=2) for p in range(2)]
    drawn = [stream.draw(step) for step in range(5) for stream in streams]
    first, second = (list(chain.from_iterable(half)) for half in (drawn[:5], drawn[5:]))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert PairStream(10, 2, seed=1, processes=2).draw(3) == drawn[6]
    assert PairStream(10, 20, seed=1, processes=2).draw(0) != drawn[0]


def test_replay_draws_by_number_and_computes_the_reference_once() -> None:
    def make() -> Replay:
        return Replay(
            tiny.pairs(6),
            PromptEncoder(tiny.tokenizer()),
            max_length=64,
            batch_size=2,
            seed=3,
            needs_reference=True,
        )

    asked: list[int] = []

    def score(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = tensors["dpo_chosen_input_ids"]
        asked.append(len(ids))
        return ids.sum(1).float(), tensors["dpo_rejected_input_ids"].sum(1).float()

    cpu = torch.device("cpu")
    replay = make()
    for _ in range(2):
        replay.complete_reference(score, cpu)
    assert sum(asked) == 6
    batches = [replay.batch(number, cpu) for number in range(4)]
    again = make()
    again.reference = replay.reference
    assert torch.equal(
        again.batch(2, cpu)["dpo_chosen_input_ids"], batches[2]["dpo_chosen_input_ids"]
    )
    for batch in batches:
        ids = batch["dpo_chosen_input_ids"]
        assert ids.shape == batch["dpo_chosen_response_mask"].shape
        assert batch["dpo_chosen_ref_logprobs"].shape == (2,)
