"""One toy for each channel of the composer, which no other channel could teach."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from composer_probe import quiet, settings
from datasets import Dataset

from diloco_cloud.composer.trainer import ComposerReplicationTrainer

#: Logs whose mean a run ended with: as many steps as it takes to see every prompt.
LAST: Final = 4
_STARTS: Final = (
    *("The weather today is", "My favourite book is", "We went to the", "In the morning I"),
    *("The best way to", "A good friend is", "On the table there", "She told me that"),
)


@dataclass(frozen=True)
class Toy:
    """What a channel is to learn, alone.

    Attributes:
        channel: as in the figures' names.
        figure: of the log, which tells how far it has come.
        steps: how long it trains.
        learning_rate: of AdamW.
        options: of the trainer; its batch and generations under ``args``.
        holds: of the figure in the first log and in the last ones: whether it was learnt.
        rule: the same in words.
    """

    channel: str
    figure: str
    steps: int
    learning_rate: float
    options: dict[str, Any]
    holds: Callable[[float, float], bool]
    rule: str

    def train(self, model: Any, tokenizer: Any, where: Path) -> dict[str, list[float]]:
        """Train, and give what was logged, step by step."""
        options = dict(self.options)
        trainer = ComposerReplicationTrainer(
            model=model,
            processing_class=tokenizer,
            args=settings(
                where,
                max_steps=self.steps,
                learning_rate=self.learning_rate,
                **options.pop("args"),
            ),
            **options,
        )
        quiet(trainer)
        trainer.train()
        names = (self.figure, "grad_norm", *_BESIDE[self.channel])
        history: list[dict[str, Any]] = trainer.state.log_history
        return {name: [float(one[name]) for one in history if name in one] for name in names}


def last(values: list[float]) -> float:
    """What a figure has come to."""
    return statistics.fmean(values[-LAST:])


_BESIDE: Final[dict[str, tuple[str, ...]]] = {
    "grpo": (),
    "sdpo": ("composer/sdpo/active",),
    "replay": ("composer/replay/loss", "composer/replay/accuracy"),
}


def _capitals(completions: list[str], **_: Any) -> list[float]:
    """The share of capitals in a completion."""
    return [sum(map(str.isupper, text)) / max(1, len(text)) for text in completions]


def _nothing(completions: list[Any], **_: Any) -> list[float]:
    """A reward that teaches nothing."""
    return [0.0] * len(completions)


def _beginnings() -> Dataset:
    return Dataset.from_dict({"prompt": list(_STARTS)})


def _hinted() -> Dataset:
    hint = "Answer in German only."
    rows = [
        {"prompt": [_SHORT, {"role": "user", "content": f"Describe {what}."}], "hint": hint}
        for what in ("a house", "the sea", "a winter day", "your work")
    ]
    return Dataset.from_list(rows)


_SHORT: Final = {"role": "system", "content": "Be brief."}


def _pairs() -> list[dict[str, Any]]:
    """Politeness is preferred."""
    things = ("the time", "a recipe", "the news", "a story", "your name", "a song", "help", "a map")
    return [
        {
            "state_messages": [_SHORT, {"role": "user", "content": f"Give me {what}."}],
            "chosen": "With pleasure, one moment please.",
            "rejected": "No, I will not do that.",
        }
        for what in things
    ]


TOYS: Final = [
    Toy(
        channel="grpo",
        figure="reward",
        steps=60,
        learning_rate=1e-4,
        options={
            "args": {
                "per_device_train_batch_size": 16,
                "num_generations": 8,
                "max_completion_length": 8,
            },
            "reward_funcs": [_capitals],
            "train_dataset": _beginnings(),
            "alpha_sdpo": 0.0,
            "beta_replay": 0.0,
        },
        # Not 1: a prompt may be stuck with one answer, and what never varies has no gradient.
        holds=lambda first, end: first < 0.1 and end > 0.8,
        rule="reward, the share of capitals: from below 0.1 to above 0.8",
    ),
    Toy(
        channel="sdpo",
        figure="composer/sdpo/loss",
        steps=15,
        learning_rate=5e-5,
        options={
            "args": {
                "per_device_train_batch_size": 8,
                "num_generations": 2,
                "max_completion_length": 8,
            },
            "reward_funcs": [_nothing],
            "train_dataset": _hinted(),
            "alpha_sdpo": 1.0,
            "beta_replay": 0.0,
        },
        holds=lambda first, end: end < first / 2,
        rule="divergence from the hinted teacher, in nats per token: below half",
    ),
    Toy(
        channel="replay",
        figure="composer/replay/margin",
        steps=8,
        learning_rate=1e-5,
        options={
            "args": {
                "per_device_train_batch_size": 2,
                "num_generations": 2,
                "max_completion_length": 2,
            },
            "reward_funcs": [_nothing],
            "train_dataset": _beginnings(),
            "alpha_sdpo": 0.0,
            "beta_replay": 1.0,
            "dpo_pairs": _pairs(),
            "replay_batch_size": 8,
        },
        holds=lambda first, end: abs(first) < 1e-3 and end > 2,
        rule="DPO margin: from 0 to above 2",
    ),
]
