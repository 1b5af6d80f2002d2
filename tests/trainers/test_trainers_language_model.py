"""The default trainer, whole: replicas in threads, their managers, and a real directory store."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from replicas import result_in

from diloco_cloud.errors import ConfigError
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.outer import MockManager
from diloco_cloud.trainers.data import TextOptions, prepare_data
from diloco_cloud.trainers.inner import validation_loss
from diloco_cloud.trainers.language_model import train

SETTINGS: dict[str, Any] = {
    "sync_every": 4,
    "rounds": 3,
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "nesterov": False,
    "hidden_size": 32,
    "layers": 2,
    "heads": 2,
    "batch_size": 4,
    "sequence_length": 32,
    "validation_sequences": 8,
    "warmup_steps": 2,
}
TOKENS_PER_STEP = 4 * 32

# Replicas are threads here, and transformers' lazy modules cannot be loaded by two at once.
importlib.import_module("transformers.models.llama.modeling_llama")
importlib.import_module("transformers.models.qwen2.modeling_qwen2")


class _Dying(MockManager):  # type: ignore[misc]
    """A manager whose replica dies in the middle of a round."""

    dies_at = 6

    def report(self, **figures: Any) -> None:
        super().report(**figures)
        if self.progress.inner_step == self.dies_at:
            raise KeyError("a crash")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("text")
    for index in range(30):
        lines = [f"{n} times {index} is {n * index}, as everybody knows\n" for n in range(60)]
        (directory / f"table{index}.txt").write_text("".join(lines))
    return str(directory)


def _manager(
    uri: Path, rank: int, world_size: int, kind: type[MockManager] = MockManager, attempt: int = 0
) -> MockManager:
    door = ObjectStoreAllReduce(
        str(uri), rank=rank, world_size=world_size, timeout_s=60, attempt=attempt
    )
    return kind(door, snapshot_every=1)


def _train(manager: MockManager, world_size: int, **settings: Any) -> dict[str, Any]:
    try:
        result = train(
            manager=manager, rank=manager.rank, world_size=world_size, **{**SETTINGS, **settings}
        )
    except BaseException:
        manager.shutdown()
        raise
    manager.shutdown(finished=True)
    return {**result, "digest": manager.global_digest()}


def _together(calls: list[Callable[[], dict[str, Any]]], *, dying: bool = False) -> list[Any]:
    """Run replicas side by side; their results in order, or, where they die, their errors."""
    ends: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            ends[index] = calls[index]()
        except Exception as error:
            ends[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    for error in ends:
        if isinstance(error, Exception) and not dying:
            raise error
    return ends


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"architecture": "qwen2", "tokenizer": "bpe", "vocabulary_size": 300},
        {"fragments": 2, "fragment_sync_delay": 1, "tie_embeddings": False},
    ],
    ids=["plain", "qwen2-bpe", "streaming"],
)
def test_two_replicas_end_identical(tmp_path: Path, text: str, settings: dict[str, Any]) -> None:
    managers = [_manager(tmp_path, rank, 2) for rank in range(2)]
    first, second = _together(
        [lambda m=m: _train(m, 2, text=text, **settings) for m in managers]  # type: ignore[misc]
    )
    assert first["digest"] == second["digest"]
    assert first["tokens"] == second["tokens"] == 12 * TOKENS_PER_STEP
    assert first["val_step"] == 12
    assert "val_loss" not in second
    json.dumps([first, second])
    manifest = json.loads((result_in(tmp_path) / "manifest.json").read_text())
    assert manifest["digest"] == first["digest"]


def test_a_lone_replica_learns_and_exports_what_transformers_loads(
    tmp_path: Path, text: str
) -> None:
    from transformers import AutoModelForCausalLM

    manager = _manager(tmp_path, 0, 1)
    result = _train(manager, 1, text=text, rounds=10, learning_rate=1e-2)
    assert result["val_loss"] < 3.5  # a uniform guess costs ln 257 = 5.5
    model = AutoModelForCausalLM.from_pretrained(result_in(tmp_path))
    options = TextOptions(
        text=text,
        tokenizer="byte",
        vocabulary_size=0,
        batch_size=1,
        sequence_length=32,
        validation_fraction=0.1,
        validation_sequences=8,
    )
    windows = prepare_data(options, rank=0, world_size=1, seed=0).validation
    assert validation_loss(model, windows) == pytest.approx(result["val_loss"], abs=1e-5)


def test_restart_goes_on_at_the_step_that_was_merged(tmp_path: Path, text: str) -> None:
    dying = [_manager(tmp_path, rank, 2, _Dying) for rank in range(2)]
    ends = _together(
        [lambda m=m: _train(m, 2, text=text) for m in dying],  # type: ignore[misc]
        dying=True,
    )
    assert [str(end) for end in ends] == ["'a crash'"] * 2
    reborn = [_manager(tmp_path, rank, 2, attempt=1) for rank in range(2)]
    first, second = _together(
        [lambda m=m: _train(m, 2, text=text) for m in reborn]  # type: ignore[misc]
    )
    # One round of four steps was merged before the crash at step six.
    assert first["tokens"] == second["tokens"] == (12 - 4) * TOKENS_PER_STEP
    assert first["digest"] == second["digest"]


def test_replicas_with_other_text_are_refused(tmp_path: Path, text: str) -> None:
    other = tmp_path / "other.txt"
    other.write_text(Path(text, "table3.txt").read_text() * 20)
    run = tmp_path / "run"
    _train(_manager(run, 0, 1), 1, text=text)
    with pytest.raises(ConfigError, match="is not the run's"):
        _train(_manager(run, 0, 1, attempt=1), 1, text=str(other))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": None}, "how long to train"),
        ({"inner_steps": 13}, "3 rounds of 4 steps"),
        ({"layers": 0}, "layers is 0"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"fragments": 4}, "4 fragments cannot be made of 2 layers"),
        ({"architecture": "rnn"}, "architecture is 'rnn'"),
        ({"tokenizer": "morse"}, "tokenizer is 'morse'"),
        ({"text": "/nowhere/at/all"}, "no text at /nowhere/at/all"),
        ({"sequence_length": 1_000_000}, "not enough for one sequence"),
    ],
)
def test_bad_settings_are_refused_before_training(
    tmp_path: Path, text: str, settings: dict[str, Any], message: str
) -> None:
    manager = _manager(tmp_path, 0, 1)
    with pytest.raises(ConfigError, match=message):
        _train(manager, 1, **{"text": text, **settings})
    assert manager.progress.inner_step == 0
