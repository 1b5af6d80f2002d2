"""Tasks of reasoning-gym (arXiv:2505.24760): over a hundred, made to order."""

from __future__ import annotations

import importlib
import json
from typing import Any

from diloco_cloud.composer.rewards import text_of
from diloco_cloud.errors import ConfigError, MissingDependencyError


class ReasoningGym:
    """One data set of reasoning-gym, such as "gsm_symbolic", "chain_sum" or "countdown".

    Args:
        dataset: its name.
        instruction: follows every question.
        **settings: of the data set.

    Raises:
        MissingDependencyError: reasoning-gym is not installed.
        ConfigError: there is no such data set, or it does not take these settings.
    """

    def __init__(
        self,
        dataset: str = "chain_sum",
        *,
        instruction: str = "Answer with the result only.",
        **settings: Any,
    ) -> None:
        try:
            self._gym: Any = importlib.import_module("reasoning_gym")
        except ImportError as error:
            raise MissingDependencyError(
                f"the task {dataset!r} needs reasoning-gym ({error})",
                fix="pip install 'diloco-cloud[rewards]'",
            ) from None
        self._name, self._instruction, self._settings = dataset, instruction, settings
        self._scorer = self._make(1, seed=0)

    def rows(self, count: int, *, seed: int) -> list[dict[str, Any]]:
        """Rows with ``prompt`` (messages) and ``entry``, which the reward is had from."""
        return [
            {
                "prompt": [
                    {"role": "user", "content": f"{entry['question']}\n{self._instruction}"}
                ],
                # As text: the entries' metadata differ in shape from row to row.
                "entry": _dump(entry),
            }
            for entry in self._make(count, seed=seed)
        ]

    def reward(self, completions: list[Any], *, entry: list[str], **_: Any) -> list[float | None]:
        """The data set's own score of the completion's last line, 0 to 1."""
        return [
            float(self._scorer.score_answer(_last_line(text_of(completion)), _load(one)))
            for completion, one in zip(completions, entry, strict=True)
        ]

    def _make(self, size: int, *, seed: int) -> Any:
        try:
            return self._gym.create_dataset(self._name, size=size, seed=seed, **self._settings)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"reasoning-gym cannot make {self._name!r} with {self._settings}: {error}",
                fix="See reasoning_gym.factory.DATASETS for the names.",
            ) from error


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _dump(entry: dict[str, Any]) -> str:
    return json.dumps(entry, default=str)


def _load(entry: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(entry)
    return found
