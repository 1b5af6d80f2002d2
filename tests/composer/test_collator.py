"""What a batch holds, when, and what is counted."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch
from chats import a_trace, chat_tokenizer, marked, with_template

from diloco_cloud.composer.collator import CollatorConfig, ComposerDataCollator
from diloco_cloud.composer.hints import dispatch
from diloco_cloud.composer.trace import TraceTurn
from diloco_cloud.errors import ConfigError

ALWAYS = {"input_ids", "attention_mask", "response_mask", "rewards"}
TEACHER = {
    *("ctx_teacher_input_ids", "ctx_teacher_attention_mask"),
    *("sdpo_loss_mask", "sdpo_student_mask"),
}
PAIRS = {
    f"dpo_{side}_{what}"
    for side in ("chosen", "rejected")
    for what in ("input_ids", "attention_mask", "response_mask")
}
TOKENIZER = chat_tokenizer("qwen2_5")
PLAIN: list[TraceTurn] = [
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hello."},
]
PAIR = {
    "state_id": "s",
    "state_messages": [{"role": "system", "content": "Be brief."}, *PLAIN, PLAIN[0]],
    "chosen": "Hello again.",
    "rejected": "You said that.",
    "n_teachers_agreeing": 2,
}


def _collator(template: str = "qwen2_5", **config: Any) -> ComposerDataCollator:
    config.setdefault("hint_generator", dispatch)
    return ComposerDataCollator(chat_tokenizer(template), CollatorConfig(**config))


def test_config_has_the_documented_defaults() -> None:
    config = CollatorConfig()
    assert (config.max_seq_len, config.max_dpo_seq_len) == (4096, 2048)
    assert (config.pad_token_id, config.ignore_index) == (0, -100)
    assert config.enable_sdpo
    assert config.hint_generator is None
    assert config.enable_replay_dpo
    assert config.rlvr_reward_key == "final_reward"
    assert ComposerDataCollator(TOKENIZER).config == config


@pytest.mark.parametrize("name", ["max_seq_len", "max_dpo_seq_len"])
def test_config_refuses_no_room(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        CollatorConfig(**{name: 0})


@pytest.mark.parametrize(
    ("example", "config", "keys"),
    [
        (a_trace(dpo_pairs=[PAIR]), {}, ALWAYS | TEACHER | PAIRS),
        (a_trace(), {}, ALWAYS | TEACHER),
        (a_trace(), {"enable_sdpo": False}, ALWAYS),
        (a_trace(), {"hint_generator": None}, ALWAYS),
        (a_trace(), {"hint_generator": lambda kind, meta: None}, ALWAYS),
        (a_trace(turns=PLAIN), {}, ALWAYS),
        (a_trace(turns=PLAIN, dpo_pairs=[PAIR]), {}, ALWAYS | PAIRS),
        (a_trace(turns=PLAIN, dpo_pairs=[PAIR]), {"enable_replay_dpo": False}, ALWAYS),
        (a_trace(turns=PLAIN, dpo_pairs=[]), {}, ALWAYS),
        (a_trace(turns=PLAIN, dpo_pairs=None), {}, ALWAYS),
    ],
)
def test_batch_has_the_keys_of_its_channels(
    example: Any, config: dict[str, Any], keys: set[str]
) -> None:
    assert _collator(**config)([example]).keys() == keys


def test_batch_holds_turns_behind_what_led_to_them() -> None:
    batch = _collator()([a_trace(turns=PLAIN)])
    text = TOKENIZER.decode(batch["input_ids"][0])
    assert text.endswith("user\nHello?<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>")
    assert marked(TOKENIZER, batch["input_ids"][0], batch["response_mask"][0]) == "Hello.<|im_end|>"
    assert batch["attention_mask"].all()


def test_rows_are_padded_on_the_right() -> None:
    collator = _collator()
    batch = collator([a_trace(turns=PLAIN), a_trace(final_reward=-1, dpo_pairs=[PAIR])])
    for prefix in ("", "ctx_teacher_", "dpo_chosen_", "dpo_rejected_"):
        ids, mask = batch[f"{prefix}input_ids"], batch[f"{prefix}attention_mask"]
        assert ids.shape == mask.shape
        assert ids.dtype == mask.dtype == torch.int64
        lengths = mask.sum(1, keepdim=True)
        assert lengths.min() > 0
        assert torch.equal(mask.bool(), torch.arange(mask.size(1)) < lengths)
        assert (ids[mask == 0] == TOKENIZER.pad_token_id).all()
    for name, ids in (("response_mask", "input_ids"), ("sdpo_student_mask", "input_ids")):
        assert batch[name].shape == batch[ids].shape
        assert not batch[name][batch["attention_mask"] == 0].any()
    assert batch["sdpo_loss_mask"].sum(1)[0] == batch["sdpo_student_mask"].sum(1)[0] == 0
    assert batch["rewards"].tolist() == [0.5, -1.0]
    assert batch["rewards"].dtype == torch.float32


def test_padding_falls_back_on_the_config() -> None:
    class Unpadded:
        pad_token_id = None

        def __call__(self, text: Any, /, **kwargs: Any) -> Any:
            return TOKENIZER(text, **kwargs)

        def apply_chat_template(self, messages: Any, /, **kwargs: Any) -> Any:
            return TOKENIZER.apply_chat_template(messages, **kwargs)

    collator = ComposerDataCollator(Unpadded(), CollatorConfig(pad_token_id=7))
    batch = collator([a_trace(), a_trace(turns=PLAIN)])
    assert (batch["input_ids"][1][batch["attention_mask"][1] == 0] == 7).all()
    assert batch["attention_mask"][1].sum() < batch["attention_mask"].size(1)


def test_teacher_reads_the_same_with_hints() -> None:
    collator = _collator("smollm2")
    batch = collator([a_trace()])
    tokenizer = chat_tokenizer("smollm2")
    student = tokenizer.decode(batch["input_ids"][0])
    teacher = tokenizer.decode(batch["ctx_teacher_input_ids"][0])
    hints = [part for part in teacher.split("\n\n") if part.startswith("Reminder: ")]
    first, second = (hint.partition("<|im_end|>")[0] for hint in hints)
    assert first == dispatch(
        "tool_not_found", {"tool_name": "Raed", "available_tools": ["Read", "Edit"]}
    )
    assert second == dispatch("json_decode", {"error_message": "Unterminated string"})
    without = teacher.replace(f"\n\n{first}", "").replace(f"\n\n{second}", "")
    assert student.startswith(without)
    assert without.endswith('"arguments": {"to}\n</tool_call><|im_end|>')


def test_masks_mark_the_error_turns_in_both() -> None:
    batch = _collator("qwen3")([a_trace()])
    student = batch["input_ids"][batch["sdpo_student_mask"].bool()]
    teacher = batch["ctx_teacher_input_ids"][batch["sdpo_loss_mask"].bool()]
    assert torch.equal(student, teacher)
    assert chat_tokenizer("qwen3").decode(student) == (
        '<think>\nI look.\n</think>\n\nReading.\n<tool_call>\n{"name": "Raed", "arguments": '
        '{"path": "a.py"}}\n</tool_call><|im_end|><tool_call>\n{"name": "Edit", "arguments": '
        '{"to}\n</tool_call><|im_end|>'
    )


@pytest.mark.parametrize("marker", ["assistant", "tool"])
def test_hint_is_asked_for_with_what_the_trace_tells(marker: str) -> None:
    asked = []

    def generator(kind: str, meta: dict[str, Any]) -> str:
        asked.append((kind, meta))
        return "H"

    turns: list[TraceTurn] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_call": {"name": "Read", "arguments": {}}},
        {"role": "tool", "content": "File not found"},
        {"role": "assistant", "content": "Oh."},
    ]
    error: Any = {"tool_error": "runtime_error", "error_meta": {"intent": "to read"}}
    turns[1 if marker == "assistant" else 2].update(error)
    batch = _collator(hint_generator=generator)([a_trace(turns=turns)])
    known = {"error_kind": "runtime_error", "tool_name": "Read", "intent": "to read"}
    message = {"error_message": "File not found"} if marker == "tool" else {}
    assert asked == [("runtime_error", known | message)]
    said = marked(TOKENIZER, batch["input_ids"][0], batch["sdpo_student_mask"][0])
    assert said.startswith("<tool_call>")


def test_error_kind_goes_before_a_message() -> None:
    asked = []
    turns: list[TraceTurn] = [
        PLAIN[0],
        {
            **PLAIN[1],  # type: ignore[typeddict-item]
            "tool_error": "KeyError: 'x'",
            "error_meta": {"error_kind": "runtime_error"},
        },
    ]
    _collator(hint_generator=lambda *call: asked.append(call))([a_trace(turns=turns)])
    message = "KeyError: 'x'"
    assert asked == [("runtime_error", {"error_kind": "runtime_error", "error_message": message})]


def test_errors_of_one_turn_share_a_hint() -> None:
    error: Any = {"role": "tool", "content": "no", "tool_error": "runtime_error"}
    call: Any = {"role": "assistant", "tool_call": {"name": "Read"}}
    turns = [PLAIN[0], call, error, error, {**error, "tool_error": "type_error"}, PLAIN[1]]
    batch = _collator()([a_trace(turns=turns)])
    teacher = TOKENIZER.decode(batch["ctx_teacher_input_ids"][0])
    assert teacher.count("Reminder: ") == 2
    assert teacher.count("this call of Read fails") == 1


def test_pairs_follow_one_prompt() -> None:
    batch = _collator()([a_trace(dpo_pairs=[PAIR]), a_trace(turns=PLAIN)])
    prompt = TOKENIZER.apply_chat_template(
        PAIR["state_messages"], add_generation_prompt=True, return_dict=False
    )
    for side in ("chosen", "rejected"):
        ids, mask = batch[f"dpo_{side}_input_ids"][0], batch[f"dpo_{side}_response_mask"][0]
        assert ids[: len(prompt)].tolist() == prompt
        assert marked(TOKENIZER, ids, mask) == f"{PAIR[side]}<|im_end|>"
        assert not mask[: len(prompt)].any()


def test_pairs_are_a_stream_of_their_own() -> None:
    collator = _collator()
    assert collator.pairs([PAIR, PAIR])["dpo_chosen_input_ids"].size(0) == 2
    assert collator.pairs([]) == {}


def test_counters_tell_what_was_active_and_what_was_left_out() -> None:
    collator = _collator(max_dpo_seq_len=64)
    unknown = a_trace()
    unknown["turns"][2]["tool_error"] = "bad_luck"
    same, long = {**PAIR, "rejected": " Hello again. "}, {**PAIR, "rejected": "no " * 100}
    batch = collator([a_trace(dpo_pairs=[PAIR, same, long]), unknown])
    assert collator.skipped == Counter(no_hint=1, pair_without_difference=1, pair_too_long=1)
    assert collator.active_tokens == {
        "response": batch["response_mask"].sum(),
        "sdpo": batch["sdpo_loss_mask"].sum(),
        "replay_dpo": batch["dpo_chosen_response_mask"].sum()
        + batch["dpo_rejected_response_mask"].sum(),
    }
    assert batch["dpo_chosen_input_ids"].size(0) == 1
    first = dict(collator.active_tokens)
    collator([a_trace(dpo_pairs=[PAIR])])
    assert all(collator.active_tokens[channel] > first[channel] for channel in first)


def test_first_omission_of_a_kind_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    collator = _collator(hint_generator=lambda kind, meta: None)
    with caplog.at_level(logging.WARNING, "diloco_cloud"):
        collator([a_trace()])
        collator([a_trace()])
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == ["traces: no_hint"]


def test_collator_refuses_a_tokenizer_without_template() -> None:
    with pytest.raises(ConfigError, match="no chat template") as error:
        ComposerDataCollator(with_template(None))
    assert "chat_template" in (error.value.fix or "")


def test_collator_names_the_example_it_refuses() -> None:
    with pytest.raises(ConfigError, match="trace 'bad' has no assistant turn"):
        _collator()([a_trace(), a_trace(trace_id="bad", turns=PLAIN[:1])])
