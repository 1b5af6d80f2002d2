"""Fixtures of the Modal backend's tests: a Modal of our own, and executors that use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import modal
import pytest
from fakes.modal_cloud import TOKEN, FakeModal, fake_modal

from diloco_cloud.executors.modal import ModalExecutor


@pytest.fixture(scope="session")
def modal_server() -> Iterator[FakeModal]:
    """One server for all tests: it keeps the files that are sent to it again and again."""
    with fake_modal() as cloud:
        yield cloud


@pytest.fixture
def modal_cloud(modal_server: FakeModal, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModal]:
    """The server, with nothing on it, and this process's environment set for it."""
    for name, value in modal_server.env.items():
        monkeypatch.setenv(name, value)
    # The SDK keeps the first client that it made from an environment, of whichever test that was.
    monkeypatch.setattr(modal.client._Client, "_client_from_env", None)
    yield modal_server
    modal_server.reset()


@pytest.fixture
def modal_executor(modal_cloud: FakeModal) -> Iterator[Callable[..., ModalExecutor]]:
    """Makes executors, each with a connection of its own."""
    clients: list[modal.Client] = []

    def make(**settings: Any) -> ModalExecutor:
        clients.append(modal.Client.from_credentials(*TOKEN))
        return ModalExecutor(client=clients[-1], **settings)

    yield make
    for client in clients:
        client.close()
