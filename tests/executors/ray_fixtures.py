"""Fixtures of the Ray backend's tests: a dashboard that runs jobs for real, and a real head."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.ray_dashboard import FakeDashboard
from fakes.ray_head import ray_binary, ray_head


@pytest.fixture
def dashboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDashboard]:
    """A fake, with no variable around that Ray's clients read."""
    _clear(monkeypatch)
    root = tmp_path / "ray"
    root.mkdir()
    fake = FakeDashboard(root, nodes_env={})
    yield fake
    fake.close()


@pytest.fixture(scope="session")
def head_address() -> Iterator[str]:
    """A real head, where ray is installed."""
    if ray_binary() is None:
        pytest.skip('ray is not installed (pip install "ray[default]")')
    root = Path(tempfile.mkdtemp(prefix="ray-"))
    try:
        with ray_head(root) as address:
            yield address
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def real_head(head_address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    _clear(monkeypatch)
    return head_address


def _clear(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ADDRESS", "API_SERVER_ADDRESS", "AUTH_TOKEN", "AUTH_TOKEN_PATH", "JOB_HEADERS"):
        monkeypatch.delenv(f"RAY_{name}", raising=False)
