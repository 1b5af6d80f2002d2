"""A fake hub, and executors that ask it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from fakes.hf_hub import FakeHub, fake_hub

from diloco_cloud.executors.hf_jobs import HFJobsExecutor

IMAGE = "registry.test/diloco:1"
PROGRAMS = "diloco_cloud.testing.programs"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub, with its address and a token in the environment."""
    monkeypatch.delenv("HF_DEBUG", raising=False)
    with fake_hub(grace_s=0.5) as hub:
        for name, value in hub.env.items():
            monkeypatch.setenv(name, value)
        yield hub


@pytest.fixture
def make(hub: FakeHub) -> Callable[..., HFJobsExecutor]:
    """Makes executors that lose no time between two tries."""

    def executor(**settings: object) -> HFJobsExecutor:
        given = {"image": IMAGE, "refresh_s": 0.02, "sleep": lambda seconds: None, **settings}
        return HFJobsExecutor(**given)  # type: ignore[arg-type]

    return executor
