"""The codec that docs/codecs.md shows, as somebody's own package that pip builds and installs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from codec_hostile import decode_anything
from codec_values import values_of

from diloco_cloud.exchange.codecs import codec_names, get_codec, require_codec
from diloco_cloud.exchange.codecs.chunks import Chunks, encode, settle
from diloco_cloud.exchange.codecs.feedback import Feedback
from diloco_cloud.exchange.layout import TensorLayout, byte_view

PAGE = Path(__file__).parents[2] / "docs" / "codecs.md"

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "my-codec"
version = "1.0"

[tool.hatch.build.targets.wheel]
include = ["my_codec.py"]
"""


def _block(language: str) -> str:
    """The page's only block in a language."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return str(text)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package is installed."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(PROJECT + _block("ini"))
    (source / "my_codec.py").write_text(_block("python"))
    offline = ["--no-index", "--no-build-isolation", "--no-deps", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "install", *offline]
    done = subprocess.run(
        [*pip, "--target", str(site), str(source)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture(autouse=True)
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(site))
    yield
    sys.modules.pop("my_codec", None)


def test_installed_codec_is_known_by_its_name() -> None:
    assert codec_names()[-1] == "fp16"
    require_codec("fp16")
    codec = get_codec("fp16")
    assert (codec.name, codec.sums, codec.decay) == ("fp16", "raw", None)
    assert type(codec).__module__ == "my_codec"


def test_installed_codec_carries_a_round() -> None:
    codec, tensors = get_codec("fp16"), [values_of("heavy", 900), values_of("gaussian", 100)]
    chunks = Chunks(TensorLayout.of(tensors), 1024)
    contributions = []
    for factor in (1.0, 3.0):
        raw = torch.frombuffer(
            bytearray(b"".join(byte_view(t * factor) for t in tensors)), dtype=torch.uint8
        )
        contributions.append(encode(codec, chunks, lambda k, raw=raw: raw[slice(*chunks.span(k))]))
    found = []
    for k in range(len(chunks)):
        mean = codec.mean(chunks.numel(k))
        for contribution in contributions:
            mean.add(contribution[k], 1.0)
        found.append(mean.result())
    torch.testing.assert_close(torch.cat(found), torch.cat(tensors) * 2, rtol=1e-3, atol=1e-5)


def test_installed_codec_has_error_feedback_if_somebody_wants_it() -> None:
    codec, values, feedback = get_codec("fp16"), values_of("heavy", 256), Feedback(256, 1.0)
    chunks = Chunks(TensorLayout.of([values]), 512)

    def read(chunk: int) -> torch.Tensor:
        return values.view(torch.uint8)[slice(*chunks.span(chunk))]

    settle(codec, chunks, read, encode(codec, chunks, read, feedback), feedback)
    assert torch.equal(feedback.residual, values - values.half().float())


@pytest.mark.parametrize("numel", [0, 1, 300])
def test_installed_codec_survives_hostile_bytes(numel: int) -> None:
    codec = get_codec("fp16")
    valid = bytes(codec.encode(values_of("heavy", numel)))
    assert decode_anything(codec, valid, numel) is not None
    for data in (valid + b"\0", valid[:-1] or b"\0", b"\xff" * 2**16):
        assert decode_anything(codec, data, numel) is None
