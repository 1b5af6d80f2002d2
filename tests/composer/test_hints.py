"""Hints: the templates, the registry, and where a hint goes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_cloud.composer import hints
from diloco_cloud.composer.hints import HINT_TEMPLATES, HintContext, dispatch, register, with_hint
from diloco_cloud.errors import ConfigError

KINDS = ["tool_not_found", "json_decode", "type_error", "runtime_error", "repeated_failure"]
FULL: HintContext = {
    "error_kind": "x",
    "error_message": "line 3 is wrong",
    "available_tools": ["Read", "Write"],
    "tool_name": "Raed",
    "tool_schema": {"type": "object", "required": ["päth"]},
    "intent": "read the file",
}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "HINT_TEMPLATES", dict(HINT_TEMPLATES))


def test_templates_are_the_documented_five() -> None:
    assert list(HINT_TEMPLATES) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_dispatch_needs_no_context(kind: str) -> None:
    hint = dispatch(kind)
    assert hint is not None
    assert hint.startswith("Reminder: ")
    assert hint == dispatch(kind, {}) == HINT_TEMPLATES[kind]({})
    assert "None" not in hint


def test_dispatch_knows_no_other_kind() -> None:
    assert dispatch("out_of_luck", FULL) is None


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("tool_not_found", ["'Raed'", "Read, Write"]),
        ("json_decode", ["valid JSON", "line 3 is wrong", '"päth"']),
        ("type_error", ["Raed", "line 3 is wrong", '"päth"']),
        ("runtime_error", ["Raed", "line 3 is wrong"]),
        ("repeated_failure", ["Raed", "line 3 is wrong", "else"]),
    ],
)
def test_templates_tell_what_is_known(kind: str, told: list[str]) -> None:
    hint = dispatch(kind, FULL) or ""
    assert all(part in hint for part in [*told, "read the file"])


@given(
    kind=st.sampled_from(KINDS),
    keys=st.sets(st.sampled_from(sorted(FULL))),
)
def test_templates_take_any_part_of_a_context(kind: str, keys: set[str]) -> None:
    ctx: Any = {key: value for key, value in FULL.items() if key in keys}
    hint = dispatch(kind, ctx) or ""
    assert hint.startswith("Reminder: ")
    assert "  " not in hint
    assert "None" not in hint


def test_templates_cut_what_is_endless() -> None:
    hint = dispatch("runtime_error", {"error_message": "x" * 100_000}) or ""
    assert len(hint) < hints.MAX_QUOTED_CHARACTERS + 500


@pytest.mark.usefixtures("registry")
def test_register_adds_and_replaces() -> None:
    register("my_error", lambda ctx: f"Reminder: try {ctx.get('intent', 'X')}.")
    assert dispatch("my_error") == "Reminder: try X."
    assert dispatch("my_error", {"intent": "Y"}) == "Reminder: try Y."
    register("json_decode", lambda ctx: "mine")
    assert dispatch("json_decode") == "mine"


@pytest.mark.usefixtures("registry")
def test_register_refuses_what_is_no_template() -> None:
    with pytest.raises(ConfigError, match="cannot register"):
        register("", lambda ctx: "x")
    with pytest.raises(ConfigError, match="cannot register"):
        register("kind", "text")  # type: ignore[arg-type]


def test_with_hint_ends_the_turn_ahead() -> None:
    messages = [{"role": "user", "content": "q"}]
    assert with_hint(messages, "H") == [{"role": "user", "content": "q\n\nH"}]
    assert messages == [{"role": "user", "content": "q"}]
    result = {"role": "tool", "content": "", "name": "Read"}
    assert with_hint([*messages, result], "H")[-1] == {**result, "content": "H"}


def test_with_hint_finds_its_place_in_the_middle() -> None:
    messages = [
        {"role": role, "content": role} for role in ("user", "assistant", "tool", "assistant")
    ]
    hinted = with_hint(messages, "H", before=3)
    assert [m["content"] for m in hinted] == ["user", "assistant", "tool\n\nH", "assistant"]


def test_with_hint_makes_a_turn_where_none_can_take_it() -> None:
    messages = [{"role": role, "content": role} for role in ("user", "assistant", "assistant")]
    hinted = with_hint(messages, "H", before=2)
    assert [m["role"] for m in hinted] == ["user", "assistant", "user", "assistant"]
    assert hinted[2] == {"role": "user", "content": "H"}
