"""What the collator is given: agentic traces, preference pairs and a tokenizer.

A trace is a conversation that was held once, turn by turn, with what went wrong marked on the turn
where it was seen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypedDict

from diloco_cloud.errors import ConfigError

ROLES = ("system", "user", "assistant", "tool")


class TraceTurn(TypedDict, total=False):
    """One turn of a trace.

    Attributes:
        role: "user", "assistant" or "tool"; the first turn may also be "system".
        content: the text, as it was written; may be absent beside a ``tool_call``.
        tool_call: of an assistant turn, ``{"name": str, "arguments": dict | str}``. OpenAI's
            ``{"function": {…}}`` and Anthropic's ``"input"`` for the arguments are understood.
            A string that is not JSON is kept as it is.
        tool_error: what went wrong: an error kind such as "json_decode", or a message. On an
            assistant turn it is about that turn, on any other about the assistant turn before it.
        error_meta: what a hint can say about the error (see ``HintContext``); ``"error_kind"``
            in it goes before ``tool_error``.
    """

    role: str
    content: str
    tool_call: dict[str, Any] | None
    tool_error: str | None
    error_meta: dict[str, Any]


class TraceExample(TypedDict, total=False):
    """One example to train on.

    Attributes:
        trace_id: names the example in messages; need not be unique.
        turns: at least a user turn and an assistant turn after it.
        final_reward: what the trace as a whole was worth; finite.
        dpo_pairs: preference pairs, each ``{"state_messages": list[TraceTurn], "chosen": str,
            "rejected": str}``; other keys of a ``DPOPair`` are not read.
    """

    trace_id: str
    turns: list[TraceTurn]
    final_reward: float
    dpo_pairs: list[dict[str, Any]] | None


class TokenizerLike(Protocol):
    """What the collator needs of a tokenizer; any of transformers' has it."""

    @property
    def pad_token_id(self) -> int | None:
        """The id that fills rows up, if there is one."""

    def __call__(self, text: Any, /, **kwargs: Any) -> Any:
        """``{"input_ids": list[list[int]]}`` of a list of texts."""

    def apply_chat_template(self, messages: Any, /, **kwargs: Any) -> Any:
        """The text of a conversation (``tokenize=False``)."""


def check_example(example: TraceExample, reward_key: str) -> None:
    """Refuse an example that nothing sensible can be made of.

    Args:
        example: one element of a batch.
        reward_key: where its reward is.

    Raises:
        ConfigError: a key is missing, a turn has an unknown role or nothing in it, there is no
            assistant turn or no user turn ahead of it, or the reward is not a finite number.
    """
    where = f"trace {example.get('trace_id', '?')!r}"
    for key in ("turns", reward_key):
        if key not in example:
            _refuse(f"{where} has no {key!r}", f"It has {_listed(example)}.")
    reward = example.get(reward_key)
    number = isinstance(reward, int | float) or hasattr(reward, "__float__")
    if not number or not math.isfinite(float(reward)):  # type: ignore[arg-type]
        _refuse(f"{where}: {reward_key!r} is {reward!r}", "A reward is a finite number.")
    turns = example["turns"]
    check_turns(turns, where)
    if not any(turn["role"] == "assistant" for turn in turns):
        _refuse(f"{where} has no assistant turn", "There is nothing to train on: leave it out.")


def check_pair(pair: Mapping[str, Any], where: str) -> None:
    """Refuse a preference pair that nothing sensible can be made of.

    Args:
        pair: ``state_messages``, ``chosen``, ``rejected``.
        where: which pair, for the message.

    Raises:
        ConfigError: a key is missing, an answer is not text or empty, or ``state_messages`` is no
            conversation that an assistant could answer.
    """
    for key in ("state_messages", "chosen", "rejected"):
        if key not in pair:
            _refuse(f"{where} has no {key!r}", f"It has {_listed(pair)}.")
    for key in ("chosen", "rejected"):
        if not isinstance(pair[key], str) or not pair[key].strip():
            _refuse(f"{where}: {key!r} is {pair[key]!r}", "It must be the text of an answer.")
    check_turns(pair["state_messages"], f"{where}: state_messages")
    if pair["state_messages"][-1]["role"] not in ("user", "tool"):
        _refuse(
            f"{where}: state_messages ends with {pair['state_messages'][-1]['role']!r}",
            'The turn to be answered must be the last: "user" or "tool".',
        )


def check_turns(turns: Sequence[TraceTurn], where: str) -> None:
    """Refuse turns that are no conversation.

    Raises:
        ConfigError: no turns, an unknown role, a turn with nothing in it, a beginning that no
            assistant could answer, or an error ahead of every assistant turn.
    """
    if not isinstance(turns, list | tuple) or not turns:
        _refuse(f"{where} has no turns", 'turns is a list of {"role": …, "content": …}.')
    for number, turn in enumerate(turns):
        _check_turn(turn, number, f"{where}, turn {number}")
    opening = turns[1:] if turns[0]["role"] == "system" else turns
    if not opening or opening[0]["role"] != "user":
        _refuse(
            f"{where} does not begin with a user turn",
            "A system turn may be first; then comes what the assistant was asked.",
        )
    for number, turn in enumerate(turns):
        if turn["role"] == "assistant":
            break
        if turn.get("tool_error"):
            _refuse(
                f"{where}, turn {number} has a tool_error ahead of every assistant turn",
                "Mark the turn that made the error, or the result that reported it.",
            )


def _check_turn(turn: TraceTurn, number: int, where: str) -> None:
    role = turn.get("role") if isinstance(turn, Mapping) else None
    if role not in ROLES:
        _refuse(f"{where} has the role {role!r}", f"Roles are {', '.join(ROLES)}.")
    if role == "system" and number:
        _refuse(f"{where} is a system turn", "Only the first turn may be one.")
    if turn.get("tool_call"):
        if role != "assistant":
            _refuse(f"{where} is a {role} turn with a tool_call", "Only an assistant calls tools.")
        call_of(turn, where)
    error, meta = turn.get("tool_error"), turn.get("error_meta")
    if not isinstance(error, str | None) or not isinstance(meta, Mapping | None):
        _refuse(
            f"{where}: tool_error is {error!r} and error_meta {meta!r}",
            "The first is text, the second a mapping.",
        )
    content = turn.get("content")
    if content is None and turn.get("tool_call"):
        return
    if not isinstance(content, str):
        _refuse(f"{where}: content is {content!r}", "It must be text.")
    if role in ("user", "assistant") and not content.strip() and not turn.get("tool_call"):
        _refuse(f"{where} is an empty {role} turn", "Give it a content, or leave it out.")


def call_of(turn: TraceTurn, where: str = "turn") -> tuple[str, dict[str, Any] | str] | None:
    """Name and arguments of a turn's tool call.

    Arguments that are a JSON object in a string come as the object; any other string is what the
    model wrote, and comes as it is.

    Raises:
        ConfigError: a call without a name.
    """
    call = turn.get("tool_call")
    if not call:
        return None
    function = call.get("function", call)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        _refuse(
            f"{where}: tool_call has no name: {call!r}",
            'It is {"name": str, "arguments": dict or str}.',
        )
    arguments = function.get("arguments", function.get("input", {}))
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return name, arguments
        return name, parsed if isinstance(parsed, dict) else arguments
    return name, arguments


def _listed(mapping: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, mapping)) or "no keys"


def _refuse(message: str, fix: str) -> NoReturn:
    raise ConfigError(message, fix=fix)
