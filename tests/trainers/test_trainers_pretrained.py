"""Pretrained models, and where what is made of them is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco_cloud.errors import ConfigError
from diloco_cloud.trainers.pretrained import TINY, load_pretrained


def test_load_pretrained_keeps_the_tiny_model_beside_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    first = load_pretrained(TINY)
    assert Path(first.model.config._name_or_path).parent == tmp_path / "diloco-cloud"
    built = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    again = load_pretrained(TINY)
    assert built == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_load_pretrained_tells_of_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    with pytest.raises(ConfigError, match=r"tiny-.* cannot be written") as caught:
        load_pretrained(TINY, cache=occupied)
    assert "HF_HOME" in str(caught.value.fix)
