"""Channel 2's teacher: what the same model would have said, had it been given the hint.

The student's turn went wrong; the teacher reads the same turn after a context that holds the hint.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from diloco_cloud.composer.data_set_rows import without_none
from diloco_cloud.composer.encoding import Prompt, PromptEncoder
from diloco_cloud.composer.hints import with_hint
from diloco_cloud.composer.row_checks import check_error_meta

#: From the kind of error and what is known of it to the hint's text, or None for no hint.
HintGenerator: TypeAlias = Callable[[str, dict[str, Any]], str | None]
Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class HintedTurn:
    """One turn of a rollout that the teacher judges.

    Attributes:
        context: ids of all that the teacher sees before the turn.
        start, end: where the turn is in the rollout's completion.
    """

    context: tuple[int, ...]
    start: int
    end: int


@dataclass
class Hints:
    """Finds the turns of rollouts that a hint is for, and writes the teacher's contexts.

    Attributes:
        encoder: of the model.
        generator: turns kinds of error into hints.
        max_length: tokens of the model's context; None for no limit.
        reads_tool_errors: whether failed tool calls of rollouts get hints.
        environments: from an environment's name to its tools. A row names its environment in
            ``environment``. Where there is only one, rows need not name it, and its key is None.
            Without environments this is empty, and every row has the encoder's tools.
        skipped: turns with a hint that cannot be used, by reason.
    """

    encoder: PromptEncoder
    generator: HintGenerator
    max_length: int | None
    reads_tool_errors: bool = False
    environments: Mapping[str | None, Sequence[Any]] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)

    def of_row(self, row: Mapping[str, Any]) -> str | None:
        """The hint a row brings: its ``hint``, or the generator's for its ``error_kind``.

        Raises:
            ConfigError: its ``error_meta`` is no object.
        """
        hint = row.get("hint")
        if not hint and row.get("error_kind"):
            meta = row.get("error_meta")
            check_error_meta(meta, "a row")
            hint = self.generator(str(row["error_kind"]), without_none(meta or {}))
        return str(hint) if hint else None

    def turn(
        self,
        row: Mapping[str, Any],
        prompt: Prompt,
        completion: Sequence[Mapping[str, Any]] | str,
        spans: Sequence[Span],
    ) -> HintedTurn | None:
        """The turn of one rollout that a hint is for, if any.

        A row's own hint is for the first turn; else the first turn whose tool call failed gets
        the generator's hint.

        Args:
            row: of the data set, with what a rollout function added.
            prompt: the rollout's.
            completion: its text, or its messages: the model's and the tools'.
            spans: where the model's own turns are in the completion's tokens.
        """
        if not spans:
            self.skipped["rollouts that are masked"] += 1
            return None
        hint, before = self.of_row(row), 0
        encoder = self._encoder_of(row)
        if hint is None and self.reads_tool_errors and not isinstance(completion, str):
            before, hint = self._tool_error(completion, encoder)
        if hint is None:
            return None
        index = sum(m["role"] == "assistant" for m in completion[:before]) if before else 0  # type: ignore[index]
        if index >= len(spans):  # The error is in what was cut off.
            self.skipped["turns that were cut off"] += 1
            return None
        start, end = spans[index]
        history: Prompt = prompt
        if before and not isinstance(prompt, str):
            history = [*prompt, *completion[:before]]
        context = encoder.prompt_ids(hinted(history, hint))
        if self.max_length is not None and len(context) + end - start > self.max_length:
            self.skipped["contexts that are too long"] += 1
            return None
        return HintedTurn(tuple(context), start, end)

    def _encoder_of(self, row: Mapping[str, Any]) -> PromptEncoder:
        """Writes the tools that this row's rollout had."""
        if not self.environments:
            return self.encoder
        name = None if None in self.environments else row["environment"]
        return replace(self.encoder, tools=self.environments[name])

    def _tool_error(
        self, messages: Sequence[Mapping[str, Any]], encoder: PromptEncoder
    ) -> tuple[int, str | None]:
        """Index of the first message whose tool call failed in a way there is a hint for."""
        turn = 0
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                turn = index
            elif message["role"] == "tool" and (error := _error_text(message.get("content"))):
                name = str(message.get("name"))
                schemas = encoder.tool_schemas()
                meta = {
                    "error_message": error,
                    "tool_name": name,
                    "available_tools": list(schemas),
                    "tool_schema": schemas.get(name),
                }
                if hint := self.generator(_error_kind(error), meta):
                    return turn, hint
        return 0, None


def hinted(prompt: Prompt, hint: str) -> Prompt:
    """``prompt`` as the teacher sees it.

    Plain text is preceded by the hint, so that what the model continues stays where it was.
    """
    return f"{hint}\n\n{prompt}" if isinstance(prompt, str) else with_hint(prompt, hint)


def own_turns(mask: Sequence[int]) -> list[Span]:
    """The runs of 1 in a completion's mask: the tokens the model itself wrote."""
    spans: list[Span] = []
    for index, value in enumerate(mask):
        if not value:
            continue
        if spans and spans[-1][1] == index:
            spans[-1] = (spans[-1][0], index + 1)
        else:
            spans.append((index, index + 1))
    return spans


def _error_text(content: Any) -> str | None:
    """What a tool message says went wrong: TRL writes ``str({"error": text})``."""
    if not isinstance(content, str) or not content.startswith("{'error':"):
        return None
    try:
        found = ast.literal_eval(content)
    except (SyntaxError, ValueError):
        return None
    return str(found["error"])


def _error_kind(error: str) -> str:
    """The hint generator's word for an exception of which only the text is known."""
    text = error.lower()
    if text.startswith("tool ") and "not found" in text:
        return "tool_not_found"
    if "argument" in text or "must be" in text:
        return "type_error"
    return "json_decode" if "json" in text else "runtime_error"
