"""Finding and calling a train function."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from diloco_cloud.errors import TrainerImportError
from diloco_cloud.outer.hand_over import HandedOver
from diloco_cloud.outer.progress import Progress
from diloco_cloud.replica.termination import Terminated
from diloco_cloud.replica.trainer import load_trainer, run_trainer

HERE = "trainers_for_tests"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.syspath_prepend(str(request.path.parent))


@pytest.mark.parametrize(
    ("module", "function"), [("no_such_module", "train"), (HERE, "nope"), (HERE, "not_callable")]
)
def test_trainer_that_cannot_be_had_is_named(module: str, function: str) -> None:
    with pytest.raises(TrainerImportError, match=f"{module}:{function}"):
        load_trainer(module, function)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("def train(:", SyntaxError),
        ("raise KeyError('weights')", KeyError),
        ("import sys; sys.exit(2)", SystemExit),
    ],
)
def test_trainer_whose_import_fails_is_an_import_error_with_its_cause(
    source: str, cause: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"broken_{uuid.uuid4().hex}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TrainerImportError, match=f"{module}:train.*{cause.__name__}") as raised:
        load_trainer(module, "train")
    assert isinstance(raised.value.__cause__, cause)


@pytest.mark.parametrize(
    ("path", "how"),
    [
        ("fit.py", 'the folder "." on PYTHONPATH and name the module "fit"'),
        ("jobs/fit.py", 'the folder "jobs" on PYTHONPATH and name the module "fit"'),
    ],
)
def test_trainer_given_as_a_path_is_told_how(path: str, how: str) -> None:
    with pytest.raises(TrainerImportError, match="is a path") as raised:
        load_trainer(path, "train")
    assert how in str(raised.value)


class Manager:
    """What is asked of a manager after the train function has ended."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.finished: list[bool] = []

    def shutdown(self, *, finished: bool) -> None:
        self.finished.append(finished)


def test_rank_whose_trainer_returns_leaves() -> None:
    manager: Any = Manager()
    assert run_trainer(lambda **_: "result", manager, 0, 1, {}) == "result"
    assert manager.finished == [True]


def test_rank_whose_trainer_caught_the_hand_over_does_not_leave() -> None:
    manager: Any = Manager()

    def train(**_: Any) -> None:
        manager.progress.phase = "handing over"

    with pytest.raises(HandedOver):
        run_trainer(train, manager, 0, 1, {})
    assert manager.finished == [False]


def test_rank_whose_trainer_caught_its_end_does_not_leave() -> None:
    manager: Any = Manager()

    def check() -> None:
        raise Terminated

    with pytest.raises(Terminated):
        run_trainer(lambda **_: None, manager, 0, 1, {}, check=check)
    assert manager.finished == [False]
