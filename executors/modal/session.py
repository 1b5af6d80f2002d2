"""What this process has of Modal: the SDK, its client, and how long an answer may take."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from diloco_cloud.executors.modal import sdk

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Session:
    """The SDK and its client, made when they are first needed.

    Args:
        client: of the SDK; default: the one of its environment.
        environment: of Modal's; None: the SDK's.
        patience_s: seconds that a question may take before its answer counts as unknown.
    """

    def __init__(
        self, client: Any = None, environment: str | None = None, patience_s: float = 20.0
    ) -> None:
        self.patience_s = patience_s
        self._client = client
        self._lock = threading.Lock()
        self.environment = environment

    @property
    def modal(self) -> Any:
        """The module ``modal``."""
        return sdk.load()

    @property
    def client(self) -> Any:
        """The SDK's client.

        Raises:
            UsageError: there are no credentials.
        """
        with self._lock:
            if self._client is None:
                try:
                    self._client = self.modal.Client.from_env()
                except Exception as error:
                    raise sdk.translated(error, "be reached") from error
            return self._client

    @property
    def environment_text(self) -> str:
        """The environment that is asked, for people."""
        name = self.environment or os.environ.get("MODAL_ENVIRONMENT")
        return f"the environment {name}" if name else "the default environment"

    def call(self, call_id: str) -> Any:
        """A call of the SDK's, by its id; nothing is asked yet."""
        return self.modal.FunctionCall.from_id(call_id, client=self.client)

    def app(self, name: str) -> Any:
        """The App of that name, if it is deployed; else None."""
        modal = self.modal
        try:
            return modal.App.lookup(name, client=self.client, environment_name=self.environment)
        except modal.exception.NotFoundError:
            return None

    def function(self, app: str, name: str) -> Any:
        """A function of a deployed App; it is looked up when it is first used."""
        return self.modal.Function.from_name(
            app, name, environment_name=self.environment, client=self.client
        )

    def secret(self, name: str) -> Any:
        """A Secret that is kept at Modal; it is looked up when it is first used."""
        return self.modal.Secret.from_name(
            name, environment_name=self.environment, client=self.client
        )

    def ask(self, question: Callable[[], T], doing: str, *, requests: int = 1) -> T:
        """The answer to a question that Modal must answer soon.

        Args:
            question: asks it.
            doing: completes "Modal could not …".
            requests: how many it may take, each as long as any.

        Raises:
            DilocoError: it has not, or refuses.
        """
        try:
            return sdk.bounded(question, requests * self.patience_s)
        except Exception as error:
            raise sdk.translated(error, doing) from error

    def try_to(self, action: Callable[[], T], doing: str) -> T | None:
        """The result of an action that may fail; None where it does."""
        try:
            return sdk.bounded(action, self.patience_s)
        except Exception as error:
            logger.warning("could not %s: %s", doing, sdk.first_line(error))
            return None
