"""Hints for channel 2: what a teacher is told about an error that the student made.

The teacher is the same model with one more paragraph in its context, right before the turn that
went wrong. A hint states what is true (the tools there are, the schema, the message) and what to
mind; it doesn't give the answer away, which the trace need not contain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from diloco_cloud.composer.data_set_rows import without_none
from diloco_cloud.errors import ConfigError

#: A schema or a message longer than this is cut: a hint is read at every error, by the teacher.
MAX_QUOTED_CHARACTERS = 2000


class HintContext(TypedDict, total=False):
    """What is known about an error. Every key may be absent.

    Attributes:
        error_kind: key of ``HINT_TEMPLATES``.
        error_message: what the tool or the runtime said.
        available_tools: names of the tools there were.
        tool_name: the tool that was called, or meant.
        tool_schema: JSON schema of that tool's arguments.
        intent: what the turn was to achieve.
    """

    error_kind: str
    error_message: str
    available_tools: list[str]
    tool_name: str
    tool_schema: dict[str, Any]
    intent: str


HintTemplate = Callable[[HintContext], str]


def hint_tool_not_found(ctx: HintContext) -> str:
    """For a call of a tool that does not exist."""
    name = ctx.get("tool_name")
    wrong = f"there is no tool named {name!r}." if name else "only tools that exist can be called."
    tools = ctx.get("available_tools")
    listed = f"The available tools are: {', '.join(tools)}." if tools else None
    return _hint(wrong, listed, _goal(ctx))


def hint_json_decode(ctx: HintContext) -> str:
    """For arguments that are not JSON."""
    return _hint(
        "tool arguments must be valid JSON: double quotes, no trailing commas, no comments, "
        "line breaks in strings escaped.",
        _schema(ctx),
        _said(ctx, "The parser said"),
        _goal(ctx),
    )


def hint_type_error(ctx: HintContext) -> str:
    """For arguments of a wrong type, a missing argument or one too many."""
    name = ctx.get("tool_name")
    return _hint(
        f"the arguments of {name} must match its schema."
        if name
        else "tool arguments must match the tool's schema.",
        _schema(ctx),
        _said(ctx, "The error was"),
        _goal(ctx),
    )


def hint_runtime_error(ctx: HintContext) -> str:
    """For a call that was well-formed and failed."""
    name = ctx.get("tool_name")
    return _hint(
        f"this call of {name} fails as it stands." if name else "this call fails as it stands.",
        _said(ctx, "The error is"),
        "Take its cause into account before you act.",
        _goal(ctx),
    )


def hint_repeated_failure(ctx: HintContext) -> str:
    """For the same thing tried again after it had failed."""
    name = ctx.get("tool_name")
    return _hint(
        f"calling {name} in this way has failed before." if name else "this has failed before.",
        _said(ctx, "The error was"),
        "Do something else: another tool, other arguments, or look at what is there first.",
        _goal(ctx),
    )


#: Error kind to template. ``register`` adds to it; changes hold for the whole process.
HINT_TEMPLATES: dict[str, HintTemplate] = {
    "tool_not_found": hint_tool_not_found,
    "json_decode": hint_json_decode,
    "type_error": hint_type_error,
    "runtime_error": hint_runtime_error,
    "repeated_failure": hint_repeated_failure,
}


def dispatch(error_kind: str, ctx: HintContext | None = None) -> str | None:
    """The hint for an error. ``CollatorConfig(hint_generator=dispatch)`` uses it.

    Args:
        error_kind: key of ``HINT_TEMPLATES``.
        ctx: what is known about the error; nothing is required, and what is None is not known.

    Returns:
        The text, or None for a kind that has no template.
    """
    template = HINT_TEMPLATES.get(error_kind)
    return None if template is None else template(without_none(ctx or {}))


def register(error_kind: str, fn: HintTemplate) -> None:
    """Add a template, or replace the one of that kind.

    Args:
        error_kind: what ``dispatch`` is asked for.
        fn: makes the text from a context in which every key may be absent.

    Raises:
        ConfigError: ``error_kind`` is not a non-empty string, or ``fn`` cannot be called.
    """
    if not isinstance(error_kind, str) or not error_kind or not callable(fn):
        raise ConfigError(
            f"cannot register {fn!r} for {error_kind!r}",
            fix="register(kind: str, template: Callable[[HintContext], str])",
        )
    HINT_TEMPLATES[error_kind] = fn


def with_hint(
    messages: Sequence[Mapping[str, Any]], hint: str, *, before: int | None = None
) -> list[dict[str, Any]]:
    """Put a hint in front of an assistant turn.

    It becomes the last paragraph of the turn ahead rather than a turn of its own: templates that
    want roles to alternate still take the conversation, and those that drop the thinking of turns
    ahead of the last question find the same last question.

    Args:
        messages: a conversation, of traces or of ``apply_chat_template``; not changed.
        hint: the text.
        before: index of the assistant turn; None for the answer that comes next.

    Returns:
        A copy of the conversation with the hint in it.
    """
    copy = [dict(message) for message in messages]
    at = len(copy) if before is None else before
    if at and copy[at - 1]["role"] in ("user", "tool"):
        content = copy[at - 1].get("content") or ""
        copy[at - 1]["content"] = f"{content}\n\n{hint}" if content else hint
    else:
        copy.insert(at, {"role": "user", "content": hint})
    return copy


def _hint(*sentences: str | None) -> str:
    return " ".join(["Reminder:", *filter(None, sentences)])


def _goal(ctx: HintContext) -> str | None:
    return f"The goal: {_quoted(ctx['intent'])}" if ctx.get("intent") else None


def _said(ctx: HintContext, introduction: str) -> str | None:
    message = ctx.get("error_message")
    return f"{introduction}: {_quoted(message)}" if message else None


def _schema(ctx: HintContext) -> str | None:
    schema = ctx.get("tool_schema")
    if not schema:
        return None
    whose = f"The schema of {ctx['tool_name']}" if ctx.get("tool_name") else "The schema"
    return f"{whose}: {_quoted(json.dumps(schema, ensure_ascii=False))}"


def _quoted(text: str) -> str:
    text = text.strip()
    cut = len(text) > MAX_QUOTED_CHARACTERS
    return f"{text[:MAX_QUOTED_CHARACTERS]}…" if cut else text
