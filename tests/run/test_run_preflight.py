"""What is found out before anything is launched, without importing the trainer."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path

import pytest

from diloco_cloud.errors import ConfigError, MissingDependencyError, TrainerImportError, UsageError
from diloco_cloud.replica_entrypoint import accepted
from diloco_cloud.run import RunSpec
from diloco_cloud.run.preflight import check_environment, check_trainer
from diloco_cloud.run.spec import TRAINER_SETTINGS


def test_check_trainer_does_not_import_it(trainer: str) -> None:
    check_trainer(trainer, {"steps": 3}, str(Path.cwd()))
    assert "toy_trainer" not in sys.modules


def test_check_trainer_does_not_import_its_parents(tmp_path: Path) -> None:
    package = tmp_path / "heavy" / "inner"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "loop.py").write_text("def train(**kwargs): ...")
    check_trainer("heavy.inner.loop:train", {"anything": 1}, str(tmp_path))


@pytest.mark.parametrize(
    ("reference", "arguments", "error", "message"),
    [
        ("nowhere.at.all:train", {}, TrainerImportError, "there is no module 'nowhere.at.all'"),
        ("toy_trainer.sub:train", {}, TrainerImportError, "there is no module"),
        ("toy_trainer:trian", {}, TrainerImportError, "Did you mean toy_trainer:train"),
        ("toy_trainer:wrong", {}, TrainerImportError, "does not take 'manager'"),
        ("toy_trainer:train", {"step": 1}, ConfigError, "Did you mean 'steps'"),
        ("toy_trainer:train", {"rank": 1}, ConfigError, "takes no argument 'rank'"),
        ("toy_trainer:needy", {}, ConfigError, "needs data"),
    ],
)
def test_check_trainer_says_what_is_wrong(
    trainer: str,
    reference: str,
    arguments: dict[str, object],
    error: type[UsageError],
    message: str,
) -> None:
    with pytest.raises(error) as caught:
        check_trainer(reference, arguments, str(Path.cwd()))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "source", ["train = 3", "train: int = 3", "train = {'lr': 1}", "a = train = 'x'"]
)
def test_check_trainer_refuses_what_nobody_can_call(tmp_path: Path, source: str) -> None:
    (tmp_path / "constant.py").write_text(source)
    with pytest.raises(TrainerImportError, match="is a value, not a function"):
        check_trainer("constant:train", {}, str(tmp_path))


@pytest.mark.parametrize("reference", ["toy_trainer:train", "toy_trainer:needy"])
def test_check_trainer_refuses_a_setting_without_effect(trainer: str, reference: str) -> None:
    with pytest.raises(ConfigError, match="fragments is 5, which would have no effect"):
        check_trainer(
            reference,
            {"data": 1} if "needy" in reference else {},
            str(Path.cwd()),
            settings={"fragments": 5},
        )
    check_trainer("toy_trainer:train", {}, str(Path.cwd()), settings={"rounds": 5})


def test_check_trainer_passes_any_setting_to_keywords(tmp_path: Path) -> None:
    (tmp_path / "taker.py").write_text("def train(**settings): ...")
    check_trainer("taker:train", {}, str(tmp_path), settings={"fragments": 5})


@pytest.mark.parametrize(
    "source",
    [
        "from elsewhere import train",
        "from elsewhere import *",
        "def __getattr__(name): ...",
        "train = make()",
        "train: object = make()",
        "train: object",
        "train, x = make(), 3",
        "try:\n    from fast import train\nexcept ImportError:\n    train = None",
        "try:\n    from fast import train\nexcept ImportError:\n    from slow import train",
        "class train: ...",
        "@decorate\ndef train(model): ...",
    ],
)
def test_check_trainer_accepts_what_only_running_can_tell(tmp_path: Path, source: str) -> None:
    (tmp_path / "dynamic.py").write_text(source)
    check_trainer("dynamic:train", {"x": 1}, str(tmp_path))


def test_check_trainer_reports_a_syntax_error_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ndef train(:\n")
    with pytest.raises(TrainerImportError, match=r"broken\.py:2 does not parse"):
        check_trainer("broken:train", {}, str(tmp_path))


def test_check_environment_misses_torchft(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent:
        """An environment without torchft, as the import system would tell it."""

        @staticmethod
        def find_spec(name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
            if name == "torchft":
                return None
            return importlib.machinery.PathFinder.find_spec(name)

    monkeypatch.delitem(sys.modules, "torchft", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent])
    with pytest.raises(MissingDependencyError, match=r"torchft.*\n.*diloco-cloud\[diloco\]"):
        check_environment(RunSpec(run_id="run-1"))
    check_environment(RunSpec(run_id="run-1", backend="modal"))


def test_settings_that_replicas_inject_are_not_missed(tmp_path: Path) -> None:
    def train(*, seed: int, rounds: int, mine: int) -> None: ...

    settings = dict.fromkeys(TRAINER_SETTINGS, 0)
    assert accepted(train, settings) == {"seed": 0, "rounds": 0}
    (tmp_path / "needs.py").write_text("def train(*, manager, rank, world_size, seed, rounds): ...")
    check_trainer("needs:train", {}, str(tmp_path))
