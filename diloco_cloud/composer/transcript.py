"""A conversation as the text the model read and wrote, piece by piece.

The trained pieces are the assistant's turns, each up to the token that ends it; all between is
context.

Rendering the whole conversation once and looking for the turns in it would not do. Few templates
mark them (``{% generation %}``), and many write a turn differently once others follow: Qwen 3 and
DeepSeek R1 drop its thinking, Mistral moves the system prompt. So each turn is rendered as the
last, as it was when it was written, and kept like that: what the model said stays in its context.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from diloco_cloud.composer.messages import Message, MessageWriter
from diloco_cloud.composer.pieces import CONTEXT, Piece, special_tokens
from diloco_cloud.composer.trace import TokenizerLike, TraceTurn
from diloco_cloud.errors import ConfigError

#: Stands for what an assistant said where only the text around it is wanted.
_PLACEHOLDER = "placeholder7b3f"
#: Written by templates of reasoning models into a turn without thinking; no model wrote it.
_NO_THOUGHTS = re.compile(r"\s*(?:<think>\s*)?</think>\s*")
_OPEN_THOUGHTS = re.compile(r"<think>\s*$")
_REOPENED_THOUGHTS = re.compile(r"\s*(?:</think>\s*)?<think>")


@dataclass(frozen=True)
class _Said:
    """An assistant turn: what its author did not write, what he did, what the template put behind.

    ``whole`` is the conversation with it at the end, as the template writes it.
    """

    unsaid: str
    text: str
    behind: str
    whole: str


class Transcriber:
    """Turns conversations into pieces of text.

    Args:
        tokenizer: with a chat template.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._writer = MessageWriter(tokenizer)
        self._special = special_tokens(tokenizer)
        self._coda = self._find_coda()

    def pieces(self, turns: Sequence[TraceTurn]) -> list[Piece]:
        """The conversation up to the end of its last assistant turn.

        Raises:
            ConfigError: the template refuses the conversation, or cannot be followed through it.
        """
        messages = self._writer.messages(turns)
        numbers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        pieces: list[Piece] = []
        before, behind = "", ""  # all text up to the last turn's end; what is behind its last word
        for number, place in zip(numbers, places, strict=True):
            prompt = self._writer.render(messages[:place], opens_turn=True)
            context = behind + self._context(messages[:place], prompt, before)
            said = self._said(messages, place, prompt, turns[number])
            pieces += [Piece(context + said.unsaid, CONTEXT), Piece(said.text, number)]
            before, behind = said.whole, said.behind
        return pieces

    def reply(self, turns: Sequence[TraceTurn]) -> list[Piece]:
        """As :meth:`pieces`, with the last turn as the only one that counts.

        What precedes it is the prompt as the template writes it to be answered.
        """
        messages = self._writer.messages(turns)
        prompt = self._writer.render(messages[:-1], opens_turn=True)
        said = self._said(messages, len(messages) - 1, prompt, turns[-1])
        return [Piece(prompt + said.unsaid, CONTEXT), Piece(said.text, len(turns) - 1)]

    def _context(self, history: list[Message], prompt: str, before: str) -> str:
        """What the template writes between the last assistant turn and the next."""
        if prompt.startswith(before):
            return prompt[len(before) :]
        # It has rewritten turns of the assistant. What follows them does not depend on their words.
        last = max(i for i, message in enumerate(history) if message["role"] == "assistant")
        masked = [_masked(message) for message in history]
        going_on = _behind_placeholder(self._writer.render(masked, opens_turn=True))
        ending = _behind_placeholder(self._whole(masked[: last + 1]))
        if going_on is not None and ending is not None:
            if going_on.startswith(ending):
                return going_on[len(ending) :]
            # gpt-oss ends the last turn with another token than those before it.
            if ending in self._special and (end := self._special_token(going_on)):
                return going_on[len(end) :]
        raise ConfigError(
            "the chat template rewrites what precedes a turn in a way that cannot be followed",
            fix="Set tokenizer.chat_template to one in which a conversation begins with the "
            "same text however it goes on; trl.chat_template_utils has some for training.",
        )

    def _said(self, messages: list[Message], place: int, prompt: str, turn: TraceTurn) -> _Said:
        """The turn that is the message at ``place``; rewrites it where the template loses it."""
        for as_text in (False, True):
            if as_text:
                messages[place] = self._writer.as_text(turn)
            history = messages[: place + 1]
            whole = self._whole(history)
            body = self._body(history, prompt, whole)
            if body is not None:
                return self._split(body, history[-1]["content"], whole)
        raise ConfigError(
            "the chat template leaves out what the assistant said",
            fix="Set tokenizer.chat_template to one for text; those of vision models often take "
            "lists of parts only.",
        )

    def _body(self, messages: list[Message], prompt: str, whole: str) -> str | None:
        """All that the last message adds to the prompt, or None where its words get lost."""
        message = messages[-1]
        said: str = message["content"]
        wanted = [call["function"]["name"] for call in message.get("tool_calls", ())]
        wanted.append(said.rpartition("</think>")[2].strip())
        opened = _OPEN_THOUGHTS.search(prompt) is not None

        def complete(body: str) -> bool:
            reopened = opened and _REOPENED_THOUGHTS.match(body)
            return not reopened and all(part in body for part in wanted)

        if whole.startswith(prompt) and complete(body := whole[len(prompt) :]):
            return body
        # The prompt opens what the history leaves out: the author's own words have to do.
        ending = _behind_placeholder(self._whole([*messages[:-1], _masked(message)]))
        if ending is None:
            return None
        thoughts = "" if "</think>" in said or not opened else "\n</think>\n\n"
        own = re.sub(r"^\s*<think>\n?", "", said) if opened else said
        body = thoughts + (own + ending if own else ending.lstrip())
        return body if complete(body) else None

    def _split(self, body: str, said: str, whole: str) -> _Said:
        thoughtless = _NO_THOUGHTS.match(body)
        unsaid = thoughtless[0] if thoughtless and not _NO_THOUGHTS.match(said) else ""
        body = body[len(unsaid) :]
        # Most templates put a line break after the token that ends a turn. No model writes it.
        stripped = body.rstrip()
        end = len(stripped) if stripped.endswith(self._special) else len(body)
        return _Said(unsaid, body[:end], body[end:], whole)

    def _whole(self, messages: Sequence[Message]) -> str:
        return self._writer.render(messages).removesuffix(self._coda)

    def _find_coda(self) -> str:
        """What the template writes only where a conversation ends (Phi 3), if anything."""
        opening = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        ended = self._writer.render(opening)
        going_on = self._writer.render([*opening, {"role": "user", "content": "c"}])
        for token in self._special:
            rest = ended.removesuffix(token)
            if rest != ended and rest.rstrip().endswith(self._special):
                return token if going_on.startswith(rest) else ""
        return ""

    def _special_token(self, text: str) -> str:
        """The special token that the text begins with, if any."""
        return max(
            (token for token in self._special if text.startswith(token)), key=len, default=""
        )


def _masked(message: Message) -> Message:
    return {**message, "content": _PLACEHOLDER} if message["role"] == "assistant" else message


def _behind_placeholder(text: str) -> str | None:
    _, found, behind = text.rpartition(_PLACEHOLDER)
    return behind if found else None
