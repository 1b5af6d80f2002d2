"""Examples and pairs that nothing can be made of are refused with one clear error."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cloud.composer.trace import call_of, check_example, check_pair
from diloco_cloud.errors import ConfigError

USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}


def _example(*turns: Any, **changes: Any) -> Any:
    return {"trace_id": "t7", "turns": list(turns), "final_reward": 1.0, **changes}


def test_check_example_takes_a_trace() -> None:
    call = {"role": "assistant", "tool_call": {"name": "Read"}}
    empty_result = {"role": "tool", "content": ""}
    system = {"role": "system", "content": "s"}
    check_example(_example(system, USER, call, empty_result, ASSISTANT, USER), "final_reward")


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"trace_id": "t7", "final_reward": 1.0}, "trace 't7' has no 'turns'"),
        ({"turns": [USER, ASSISTANT]}, "has no 'final_reward'"),
        (_example(), "has no turns"),
        (_example(USER, ASSISTANT, turns="text"), "has no turns"),
        (_example(USER), "has no assistant turn"),
        (_example(ASSISTANT), "does not begin with a user turn"),
        (_example({"role": "system", "content": "s"}), "does not begin with a user turn"),
        (_example(USER, {"role": "human", "content": "x"}), "turn 1 has the role 'human'"),
        (_example(USER, "text"), "turn 1 has the role None"),
        (_example(USER, {"role": "system", "content": "s"}), "turn 1 is a system turn"),
        (_example(USER, {"role": "assistant", "content": " \n"}), "empty assistant turn"),
        (_example({"role": "user", "content": ""}, ASSISTANT), "empty user turn"),
        (_example(USER, {"role": "assistant"}), "content is None"),
        (_example(USER, {"role": "assistant", "content": ["part"]}), "content is ['part']"),
        (_example({**USER, "tool_call": {"name": "x"}}), "user turn with a tool_call"),
        (_example(USER, {**ASSISTANT, "tool_call": {"id": 1}}), "tool_call has no name"),
        (_example({**USER, "tool_error": "x"}, ASSISTANT), "ahead of every assistant turn"),
        (_example(USER, {**ASSISTANT, "tool_error": 3}), "tool_error is 3"),
        (_example(USER, {**ASSISTANT, "error_meta": "x"}), "error_meta 'x'"),
        (_example(USER, ASSISTANT, final_reward=float("nan")), "'final_reward' is nan"),
        (_example(USER, ASSISTANT, final_reward=float("inf")), "'final_reward' is inf"),
        (_example(USER, ASSISTANT, final_reward=None), "'final_reward' is None"),
    ],
)
def test_check_example_says_what_is_wrong(example: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_example(example, "final_reward")
    assert message in error.value.message
    assert error.value.fix


def test_check_example_reads_the_configured_reward() -> None:
    check_example(_example(USER, ASSISTANT, score=2), "score")
    with pytest.raises(ConfigError, match="'other'"):
        check_example(_example(USER, ASSISTANT), "other")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chosen": None}, "'chosen' is None"),
        ({"rejected": "  "}, "'rejected' is '  '"),
        ({"state_messages": []}, "state_messages has no turns"),
        ({"state_messages": [USER, ASSISTANT]}, "ends with 'assistant'"),
    ],
)
def test_check_pair_says_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    pair = {"state_messages": [USER], "chosen": "yes", "rejected": "no"}
    check_pair(pair, "pair 0")
    with pytest.raises(ConfigError) as error:
        check_pair({**pair, **changes}, "pair 0")
    assert message in error.value.message
    del pair["chosen"]
    with pytest.raises(ConfigError, match="pair 0 has no 'chosen'"):
        check_pair(pair, "pair 0")


@pytest.mark.parametrize(
    "call",
    [
        {"name": "Read", "arguments": {"path": "a"}},
        {"name": "Read", "arguments": '{"path": "a"}'},
        {"name": "Read", "input": {"path": "a"}},
        {"id": "1", "type": "function", "function": {"name": "Read", "arguments": {"path": "a"}}},
    ],
)
def test_call_of_understands_the_usual_forms(call: dict[str, Any]) -> None:
    assert call_of({"role": "assistant", "tool_call": call}) == ("Read", {"path": "a"})


@pytest.mark.parametrize("broken", ['{"path": ', "[1]", "a.py"])
def test_call_of_keeps_what_is_no_json_object(broken: str) -> None:
    call = {"name": "Read", "arguments": broken}
    assert call_of({"role": "assistant", "tool_call": call}) == ("Read", broken)
