"""The tables of docs/backends name every setting of a backend, and none that it lacks."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "backends"
#: Arguments that only Python can give.
INJECTED = {"client", "clock", "run", "sleep"}
_ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \|", re.MULTILINE)


@pytest.mark.parametrize("backend", ["hf-jobs", "modal", "ray", "sagemaker", "slurm"])
def test_page_lists_the_settings_that_there_are(backend: str) -> None:
    (found,) = entry_points(group="diloco_cloud.executors", name=backend)
    text = (PAGES / f"{backend}.md").read_text()
    section = text.split("\n## Settings\n")[1].split("\n## ")[0]
    listed = {name for row in _ROW.findall(section) for name in re.findall(r"\w+", row)}
    assert listed == set(inspect.signature(found.load()).parameters) - INJECTED
