"""One trace as the student reads it and, where something went wrong, as the teacher does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from diloco_cloud.composer.hints import with_hint
from diloco_cloud.composer.pieces import CONTEXT, Piece, PieceTokenizer, Tokens
from diloco_cloud.composer.trace import TraceTurn, call_of
from diloco_cloud.composer.transcript import Transcriber
from diloco_cloud.composer.truncation import keep_turns

HintGenerator = Callable[[str, Any], str | None]


@dataclass(frozen=True)
class TraceRow:
    """A trace in tokens.

    Attributes:
        student: all turns that were kept.
        teacher: the same up to the last error turn, with a hint before each of them; None where
            no error turn has a hint.
        errors: indices of the error turns, as in the tokens' ``turns``.
    """

    student: Tokens
    teacher: Tokens | None = None
    errors: frozenset[int] = frozenset()


@dataclass(frozen=True)
class TraceRows:
    """Makes rows of traces.

    Attributes:
        transcriber: turns conversations into text.
        tokenizer: turns that into tokens.
        max_length: most tokens of a row.
        hint_generator: turns an error into a hint; None for no teacher.
        skipped: where what is left out is counted.
    """

    transcriber: Transcriber
    tokenizer: PieceTokenizer
    max_length: int
    hint_generator: HintGenerator | None
    skipped: Counter[str]

    def row(self, turns: Sequence[TraceTurn]) -> TraceRow | None:
        """The row of a trace, or None if it does not fit. Counts what is left out."""
        hints = self._hints(turns)
        found = len(hints)
        row = self._fitted(turns, hints)
        if row is None and hints:
            alone = {i: hint for i, hint in hints.items() if self._fitted(turns, {i: hint})}
            hints = alone
            row = self._fitted(turns, hints)
        while row is None and hints:  # each fits, but not all: the oldest goes first
            del hints[min(hints)]
            row = self._fitted(turns, hints)
        self._count("error_turn_too_long", found - len(hints))
        if row is None:
            self._count("example_too_long", 1)
            return None
        kept, result = row
        self._count("turns_dropped", _end(turns) - len(kept))
        return result

    def fits(self, turns: Sequence[TraceTurn]) -> bool:
        """Whether :meth:`row` would make one."""
        return self._fitted(turns, {}) is not None

    def _hints(self, turns: Sequence[TraceTurn]) -> dict[int, str]:
        """The hint for each assistant turn that made an error and has one."""
        if self.hint_generator is None:
            return {}
        hints: dict[int, str] = {}
        author = 0
        for number, turn in enumerate(turns):
            if turn["role"] == "assistant":
                author = number
            if not turn.get("tool_error"):
                continue
            kind, context = _error(turn, turns[author])
            hint = self.hint_generator(kind, context)
            if not hint:
                self._count("no_hint", 1)
            elif hint not in hints.get(author, ""):  # of several calls' errors, each once
                hints[author] = f"{hints[author]}\n{hint}" if author in hints else hint
        return hints

    def _fitted(
        self, turns: Sequence[TraceTurn], hints: Mapping[int, str]
    ) -> tuple[list[int], TraceRow] | None:
        """As many turns as fit, the hinted among them, and their row."""
        made: dict[int, TraceRow] = {}  # by number of turns: each choice has fewer

        def fits(kept: Sequence[int]) -> bool:
            row = made[len(kept)] = self._transcribed(turns, kept, hints)
            return max(len(row.student), len(row.teacher or ())) <= self.max_length

        final = _end(turns) - 1
        first, last = min(hints, default=final), max(hints, default=final)
        least = self.tokenizer.least(turns)
        kept = keep_turns(turns, first, last, least=least, room=self.max_length, fits=fits)
        return None if kept is None else (kept, made[len(kept)])

    def _transcribed(
        self, turns: Sequence[TraceTurn], kept: Sequence[int], hints: Mapping[int, str]
    ) -> TraceRow:
        pieces = self._pieces([turns[i] for i in kept], kept)
        student = self.tokenizer.tokens(pieces)
        if not hints:
            return TraceRow(student)
        said = {piece.turn: piece for piece in pieces}
        hinted, numbers = _hinted([turns[i] for i in kept if i <= max(hints)], kept, hints)
        # A turn's own words are the student's, even if the template would write them anew.
        teacher = self.tokenizer.tokens(
            [p if p.turn == CONTEXT else said[p.turn] for p in self._pieces(hinted, numbers)]
        )
        return TraceRow(student, teacher, frozenset(hints))

    def _pieces(self, turns: Sequence[TraceTurn], numbers: Sequence[int]) -> list[Piece]:
        return [
            piece if piece.turn == CONTEXT else replace(piece, turn=numbers[piece.turn])
            for piece in self.transcriber.pieces(turns)
        ]

    def _count(self, what: str, how_many: int) -> None:
        if how_many:
            self.skipped[what] += how_many


def _error(turn: TraceTurn, author: TraceTurn) -> tuple[str, dict[str, Any]]:
    """Kind and context of an error, with what the trace itself tells about it."""
    said = str(turn["tool_error"])
    meta = dict(turn.get("error_meta") or {})
    kind = str(meta.get("error_kind") or said)
    known: dict[str, Any] = {"error_kind": kind}
    if message := _message(turn, said, kind):
        known["error_message"] = message
    if call := call_of(author):
        known["tool_name"] = call[0]
    return kind, known | meta


def _message(turn: TraceTurn, said: str, kind: str) -> str:
    """What the tool said: ``tool_error``, or the result where that is only the kind."""
    if said != kind:
        return said
    return turn.get("content", "") if turn["role"] == "tool" else ""


def _hinted(
    turns: Sequence[TraceTurn], numbers: Sequence[int], hints: Mapping[int, str]
) -> tuple[list[TraceTurn], list[int]]:
    """Turns with the hints in them, and their numbers: CONTEXT for a turn that is only a hint."""
    numbers = list(numbers[: len(turns)])
    hinted = list(turns)
    for number in sorted(hints, reverse=True):
        at = numbers.index(number)
        before = len(hinted)
        hinted = cast(list[TraceTurn], with_hint(hinted, hints[number], before=at))
        if len(hinted) > before:
            numbers.insert(at, CONTEXT)
    return hinted, numbers


def _end(turns: Sequence[TraceTurn]) -> int:
    """Number of turns up to the last assistant turn."""
    return 1 + max(i for i, turn in enumerate(turns) if turn["role"] == "assistant")
