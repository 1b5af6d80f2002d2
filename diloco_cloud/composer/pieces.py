"""Pieces of a conversation's text, and their token ids.

Every piece is tokenised by itself, so a turn has the same ids whatever stands before it: that is
what channel 2 compares, and how the model produced them, token after token behind a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diloco_cloud.composer.trace import TokenizerLike, TraceTurn

#: Stands for the index of a turn where there is none.
CONTEXT = -1
#: At either end of a text a token may merge with what is written there.
_MERGED = 4


@dataclass(frozen=True)
class Piece:
    """Text of one assistant turn (``turn`` is its index), or of what stands before it (CONTEXT)."""

    text: str
    turn: int


@dataclass(frozen=True)
class Tokens:
    """Ids of a conversation, and the turn that each belongs to, or CONTEXT."""

    ids: list[int]
    turns: list[int]

    def __len__(self) -> int:
        return len(self.ids)


class PieceTokenizer:
    """Ids of pieces of a conversation.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer)
        letter, line, newline = self._ids(["b", "\nb", "\n"])
        # Some tokenizers put a space before any text (Llama 2, Phi 3).
        self._newline = newline if line[-len(letter) :] != letter else []

    def tokens(self, pieces: Sequence[Piece]) -> Tokens:
        """Ids of the pieces, each tokenised by itself."""
        ids: list[int] = []
        turns: list[int] = []
        for piece, piece_ids in zip(pieces, self._ids([p.text for p in pieces]), strict=True):
            if ids and self._newline:
                piece_ids = self._without_space(piece.text, piece_ids)
            ids += piece_ids
            turns += [piece.turn] * len(piece_ids)
        return Tokens(ids, turns)

    def least(self, turns: Sequence[TraceTurn]) -> list[int]:
        """A lower bound of the tokens that each turn takes in a conversation."""
        ids = self._ids([(turn.get("content") or "").strip() for turn in turns])
        return [max(0, len(one) - _MERGED) for one in ids]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        # The template has written the special tokens itself.
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return ids

    def _without_space(self, text: str, ids: list[int]) -> list[int]:
        """Ids of text in the middle of a row: behind a line break there is no space before it."""
        if text.startswith(self._special):
            return ids
        (behind,) = self._ids([f"\n{text}"])
        length = len(self._newline)
        return behind[length:] if behind[:length] == self._newline else ids


def special_tokens(tokenizer: TokenizerLike) -> tuple[str, ...]:
    """Texts that are one token each, such as those that end a turn, where the tokenizer tells."""
    named: Sequence[str] = getattr(tokenizer, "all_special_tokens", [])
    added: Mapping[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    return tuple({*named, *added})
