"""Sums and differences of small numbers: a task that needs no package and no data."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from diloco_cloud.composer.rewards import last_number, text_of
from diloco_cloud.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """``terms`` numbers of up to ``digits`` digits, added and subtracted.

    Attributes:
        digits: of each number, at most.
        terms: numbers in a question.
        conversation: whether prompts are messages rather than text.
        hints: whether rows have a ``hint`` for channel 2, which is how to go about it.
    """

    digits: int = 1
    terms: int = 2
    conversation: bool = True
    hints: bool = False

    def __post_init__(self) -> None:
        for name in ("digits", "terms"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", fix="It must be at least 1.")

    @property
    def size(self) -> int:
        """Questions that there are."""
        return int(10 ** (self.digits * self.terms)) << (self.terms - 1)

    def rows(self, count: int, *, seed: int) -> list[dict[str, Any]]:
        """Rows with ``prompt`` and ``answer``; no question twice, so at most :attr:`size`."""
        draw = random.Random(seed)
        if 2 * count > self.size:
            return [self._row(place) for place in draw.sample(range(self.size), self.size)[:count]]
        places: dict[int, None] = {}
        while len(places) < count:
            places[draw.randrange(self.size)] = None
        return [self._row(place) for place in places]

    def reward(self, completions: list[Any], *, answer: list[int], **_: Any) -> list[float | None]:
        """1 where the last number of the completion is the answer, else 0."""
        return [
            float(last_number(text_of(completion)) == right)
            for completion, right in zip(completions, answer, strict=True)
        ]

    def _row(self, place: int) -> dict[str, Any]:
        """The question at ``place`` of all."""
        numbers, signs = [], []
        for _ in range(self.terms):
            place, number = divmod(place, 10**self.digits)
            numbers.append(number)
        for _ in numbers[1:]:
            place, bit = divmod(place, 2)
            signs.append(-1 if bit else 1)
        question = str(numbers[0])
        for sign, number in zip(signs, numbers[1:], strict=True):
            question += f" {'+' if sign > 0 else '-'} {number}"
        answer = numbers[0] + sum(s * n for s, n in zip(signs, numbers[1:], strict=True))
        text = f"What is {question}? Answer with the number only."
        row: dict[str, Any] = {
            "prompt": [{"role": "user", "content": text}] if self.conversation else text,
            "answer": answer,
        }
        if self.hints:
            row["hint"] = f"Go from left to right. The result is {answer}."
        return row
