"""A secret that is easily found again, however it was written."""

from __future__ import annotations

#: With what JSON, shells and logs write in another way. Each piece is found in any of them.
CANARY = 'canary-51c7 "in" $the\nsecond-51c7\\line'
PIECES = ("canary-51c7", "second-51c7")


def leaks(text: str) -> list[str]:
    """Pieces of the canary that are in a text."""
    return [piece for piece in PIECES if piece in text]
