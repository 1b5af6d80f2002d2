from __future__ import annotations

import sys
from pathlib import Path

import pytest

from diloco_cloud.entrypoints import Function, find_module, resolve
from diloco_cloud.errors import ConfigError, DilocoError, TrainerImportError
from diloco_cloud.executor import Script


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose modules must not be imported."""
    root = tmp_path / "heavy"
    (root / "inner").mkdir(parents=True)
    for folder in (root, root / "inner"):
        (folder / "__init__.py").write_text("raise SystemExit('imported')")
    (root / "inner" / "training.py").write_text(
        "raise SystemExit('imported')\n"
        "if 1:\n"
        "    def train(): hidden = 1\n"
        "main = train\n"
        "from os import path as other, sep\n"
        "for looped in (): pass\n"
    )
    (root / "lazy.py").write_text("def __getattr__(name): return print")
    (root / "star.py").write_text("from .inner.training import *")
    (root / "broken.py").write_text("def main(:\n")
    (tmp_path / "namespace").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    return root


@pytest.mark.parametrize(
    ("name", "module", "function"),
    [
        ("heavy.inner.training", "heavy.inner.training", "main"),
        ("heavy.inner.training.train", "heavy.inner.training", "train"),
        ("heavy.inner.training:train", "heavy.inner.training", "train"),
        ("heavy.inner.training:other", "heavy.inner.training", "other"),
        ("heavy.inner.training:looped", "heavy.inner.training", "looped"),
        ("heavy.lazy:anything", "heavy.lazy", "anything"),
        ("heavy.star:anything", "heavy.star", "anything"),
        ("json:dumps", "json", "dumps"),
        ("math:sqrt", "math", "sqrt"),
        ("os.path.join", "os.path", "join"),
    ],
)
@pytest.mark.usefixtures("package")
def test_resolve_names_without_importing(name: str, module: str, function: str) -> None:
    assert resolve(name) == Function(module, function)
    assert not [loaded for loaded in sys.modules if loaded.startswith("heavy")]


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("train.py", ConfigError, "Script('train.py')"),
        ("./train", ConfigError, "Script("),
        ("", ConfigError, "not an entrypoint"),
        ("a b", ConfigError, "not an entrypoint"),
        ("a:b:c", ConfigError, "not an entrypoint"),
        ("heavy..inner", ConfigError, "not an entrypoint"),
        ("no_such_thing", TrainerImportError, "no module 'no_such_thing'"),
        ("no_such_thing.at.all", TrainerImportError, "no module 'no_such_thing.at.all'"),
        ("no_such_thing:main", TrainerImportError, "no module 'no_such_thing'"),
        ("json.decoder.no.such", TrainerImportError, "no module"),
        ("json.dumpz", TrainerImportError, "'json' has no function 'dumpz'"),
        ("json:__doc__", TrainerImportError, "has no function"),
        ("heavy.inner.training:hidden", TrainerImportError, "has no function 'hidden'"),
        ("heavy.broken", TrainerImportError, "not valid Python"),
        ("namespace", TrainerImportError, "has no function 'main'"),
    ],
)
@pytest.mark.usefixtures("package")
def test_resolve_refuses_what_cannot_be_called(
    name: str, error: type[DilocoError], words: str
) -> None:
    with pytest.raises(error) as caught:
        resolve(name)
    assert words in str(caught.value)
    assert caught.value.fix


def test_package_that_extends_its_path_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "growing").mkdir()
    (tmp_path / "growing" / "__init__.py").write_text("__path__.append(__path__[0] + '/more')")
    (tmp_path / "growing" / "more").mkdir()
    (tmp_path / "growing" / "more" / "leaf.py").write_text("def main(): pass")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert resolve("growing.leaf") == Function("growing.leaf", "main")
    finally:
        sys.modules.pop("growing", None)


def test_package_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing").mkdir()
    (tmp_path / "failing" / "__init__.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TrainerImportError, match="'failing' cannot be imported: ZeroDivisionError"):
        resolve("failing.absent")


def test_find_module_of_a_module_that_is_no_package() -> None:
    assert find_module("math.sqrt") is None


def test_resolve_script(tmp_path: Path) -> None:
    script = Script(str(tmp_path / "x.py"))
    with pytest.raises(TrainerImportError, match="there is no script"):
        resolve(script)
    Path(script.path).touch()
    assert resolve(script) == script


def test_resolve_callable_only_where_it_can_run() -> None:
    assert resolve(len, callables=True) is len
    with pytest.raises(ConfigError, match="cannot run a callable"):
        resolve(len)
    with pytest.raises(ConfigError, match="a int cannot be an entrypoint"):
        resolve(3, callables=True)  # type: ignore[arg-type]
