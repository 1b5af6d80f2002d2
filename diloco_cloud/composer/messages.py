"""Trace turns as the messages a chat template takes, in the form that this template renders whole.

Templates differ in what they silently leave out: many know no tool calls (ChatML, Llama 3), some
drop the text beside one (Llama 3.1) or the tools' results (Phi 3), others refuse the tool role
(Gemma). A trace whose failed call is not in the tokens teaches nothing about it, so each form is
tried on the template first. What it can't say is written as text, as Qwen and Hermes write it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

from diloco_cloud.composer.trace import TokenizerLike, TraceTurn, call_of
from diloco_cloud.errors import ConfigError

Message = dict[str, Any]
#: How a template takes the arguments of a call: an object, a string, or not at all.
CallForm = Literal["object", "string", "text"]

_NAME, _VALUE, _CONTENT = "probe_name_5d1c", "probe_value_8e27", "probe_content_f3a9"


class MessageWriter:
    """Writes turns as messages, and messages as text.

    Args:
        tokenizer: with a chat template.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: TokenizerLike) -> None:
        # A tokenizer without the attribute may well render; the first example tells.
        if getattr(tokenizer, "chat_template", "") is None:
            raise ConfigError(
                f"{type(tokenizer).__name__} has no chat template, so turns cannot be written "
                "the way the model reads them",
                fix="Use an instruction-tuned model's tokenizer, or set tokenizer.chat_template.",
            )
        self._tokenizer = tokenizer
        self._call_forms: dict[tuple[bool, bool], CallForm] = {}

    def messages(self, turns: Sequence[TraceTurn]) -> list[Message]:
        """The messages of a conversation; assistant turns stay one to one, in order."""
        written: list[Message] = []
        for turn in turns:
            message = self._message(turn)
            adjacent = written and written[-1]["role"] == message["role"] == "user"
            if adjacent and not self._takes_tool_role:
                # A result written as a user's message, and templates that want roles to alternate.
                joined = f"{written[-1]['content']}\n\n{message['content']}"
                written[-1] = {"role": "user", "content": joined}
            else:
                written.append(message)
        return written

    def as_text(self, turn: TraceTurn) -> Message:
        """The message of an assistant turn with its tool call, if any, written out."""
        content, call = turn.get("content") or "", call_of(turn)
        parts = [content, _call_text(*call) if call else ""]
        return {"role": "assistant", "content": "\n".join(filter(None, parts))}

    def render(self, messages: Sequence[Message], *, opens_turn: bool = False) -> str:
        """The text of a conversation.

        Args:
            messages: of :meth:`messages`.
            opens_turn: end with what stands before the assistant's next words.

        Raises:
            ConfigError: the template refuses the conversation.
        """
        try:
            return self._rendered(messages, opens_turn)
        except Exception as error:  # a template raises what it likes, as does a tokenizer
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"the chat template cannot write the turns {roles}: {error}",
                fix="Set tokenizer.chat_template to one that takes them, or change the trace.",
            ) from error

    def _rendered(self, messages: Sequence[Message], opens_turn: bool = False) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=opens_turn
            )
        )

    def _message(self, turn: TraceTurn) -> Message:
        role, content, call = turn["role"], turn.get("content") or "", call_of(turn)
        if role == "tool" and not self._takes_tool_role:
            return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        if call is None:
            return {"role": role, "content": content}
        name, arguments = call
        form = self._call_form(bool(content.strip()), isinstance(arguments, str))
        if form == "text":
            return self.as_text(turn)
        if form == "string":
            arguments = arguments if isinstance(arguments, str) else _json(arguments)
        return {"role": role, "content": content, "tool_calls": [_call(name, arguments)]}

    @cached_property
    def _takes_tool_role(self) -> bool:
        call: TraceTurn = {
            "role": "assistant",
            "content": "",
            "tool_call": {"name": _NAME, "arguments": {"key": _VALUE}},
        }
        messages = [
            {"role": "user", "content": "a"},
            self._message(call),
            {"role": "tool", "content": _CONTENT},
            {"role": "assistant", "content": "b"},
        ]
        return self._survive(messages, _CONTENT)

    def _call_form(self, beside_text: bool, verbatim: bool) -> CallForm:
        """The form in which a call survives.

        Args:
            beside_text: there is text in the same turn.
            verbatim: the arguments are no JSON, and must come out as they are.
        """
        key = (beside_text, verbatim)
        if key not in self._call_forms:
            self._call_forms[key] = self._find_call_form(*key)
        return self._call_forms[key]

    def _find_call_form(self, beside_text: bool, verbatim: bool) -> CallForm:
        content = _CONTENT if beside_text else ""
        broken = f'{{"key": "{_VALUE}'
        forms: list[tuple[CallForm, Any, str]] = [
            ("object", {"key": _VALUE}, _VALUE),
            ("string", _json({"key": _VALUE}), _json({"key": _VALUE})),
        ]
        if verbatim:
            forms = [("string", broken, broken)]
        for form, arguments, expected in forms:
            call = _call(_NAME, arguments)
            messages: list[Message] = [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": content, "tool_calls": [call]},
            ]
            if self._survive(messages, _NAME, expected, content):
                return form
        return "text"

    def _survive(self, messages: list[Message], *wanted: str) -> bool:
        try:
            text = self._rendered(messages)
        except Exception:  # refused, in whatever way
            return False
        return all(part in text for part in wanted)


def _call(name: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    # Mistral's templates want an id, of nine characters.
    function = {"name": name, "arguments": arguments}
    return {"id": "call00000", "type": "function", "function": function}


def _call_text(name: str, arguments: dict[str, Any] | str) -> str:
    written = arguments if isinstance(arguments, str) else _json(arguments)
    return f'<tool_call>\n{{"name": {_json(name)}, "arguments": {written}}}\n</tool_call>'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
