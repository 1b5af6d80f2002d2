"""Codecs by name, and those of other packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from diloco_cloud.errors import ConfigError, MissingDependencyError, UsageError
from diloco_cloud.exchange.codecs import codec_names, get_codec, require_codec

PLUGIN = """
from diloco_cloud.exchange.codecs.base import Codec
from diloco_cloud.exchange.codecs.plain import BFloat16

class Halves(BFloat16):
    name = "halves"

class Unnamed(BFloat16):
    pass

class Unfinished(Codec):
    name = "theirs"

class Nameless(Codec):
    encode = decode = longest = None

class Priceless(Nameless):
    name = "theirs"

class Stranded(BFloat16):
    name = "theirs"
    sums = "no-such-codec"

def broken():
    raise RuntimeError("out of order")
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where an installed package declares its codecs; tests write which."""
    (tmp_path / "somebodys_codecs.py").write_text(PLUGIN)
    metadata = tmp_path / "somebodys_codecs-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-codecs\nVersion: 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield metadata / "entry_points.txt"
    sys.modules.pop("somebodys_codecs", None)


def _declare(entries: Path, *lines: str) -> None:
    entries.write_text("\n".join(["[diloco_cloud.codecs]", *lines]) + "\n")


def test_every_name_gives_its_codec() -> None:
    assert codec_names()[:6] == ["fp32", "bf16", "int8", "e3m0", "e2m1", "sparse"]
    for name in codec_names():
        require_codec(name)
        assert get_codec(name).name == name


@pytest.mark.parametrize("ask", [get_codec, require_codec])
def test_unknown_name_is_refused_with_a_suggestion(ask: Callable[[str], object]) -> None:
    with pytest.raises(ConfigError, match="there is no codec 'e3m1'") as caught:
        ask("e3m1")
    assert caught.value.fix is not None
    assert "Did you mean 'e3m0'" in caught.value.fix or "Did you mean 'e2m1'" in caught.value.fix
    assert "sparse" in caught.value.fix


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="density"):
        get_codec("sparse", density=0.1)


def test_codec_of_another_package_is_found_and_used(plugin: Path) -> None:
    _declare(plugin, "halves = somebodys_codecs:Halves")
    assert codec_names()[-1] == "halves"
    codec = get_codec("halves")
    assert codec.decode(codec.encode(torch.ones(3)), 3).tolist() == [1, 1, 1]


def test_codec_of_another_package_never_takes_the_place_of_ours(plugin: Path) -> None:
    _declare(plugin, "int8 = somebodys_codecs:Halves")
    assert codec_names().count("int8") == 1
    assert type(get_codec("int8")).__module__.startswith("diloco_cloud.")


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        ("somebodys_codecs:Unnamed", UsageError, "calls itself 'bf16'"),
        ("somebodys_codecs:Unfinished", UsageError, "abstract"),
        ("somebodys_codecs:Nameless", UsageError, "no name"),
        ("somebodys_codecs:Priceless", UsageError, "no bits_per_parameter"),
        ("somebodys_codecs:Stranded", UsageError, "no-such-codec"),
        ("somebodys_codecs:broken", UsageError, "out of order"),
        ("somebodys_codecs:PLUGIN", UsageError, "cannot be used"),
        ("builtins:dict", UsageError, "not a Codec"),
        ("no_such_module:Codec", MissingDependencyError, "no_such_module"),
    ],
)
def test_broken_codec_of_another_package_is_named(
    plugin: Path, entry: str, error: type[Exception], message: str
) -> None:
    _declare(plugin, f"theirs = {entry}")
    with pytest.raises(error, match=message):
        get_codec("theirs")


def test_codec_declared_twice_is_refused(plugin: Path) -> None:
    _declare(plugin, "theirs = somebodys_codecs:Halves")
    other = plugin.parent.with_name("other-1.0.dist-info")
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1")
    _declare(other / "entry_points.txt", "theirs = somebodys_codecs:Unnamed")
    with pytest.raises(UsageError, match="more than once"):
        get_codec("theirs")


def test_names_cost_no_torch() -> None:
    code = (
        "import sys\n"
        "from diloco_cloud.exchange.codecs import codec_names, require_codec\n"
        "require_codec(codec_names()[0])\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ, check=True, timeout=60)
