"""What the fake Modal keeps: Apps, functions, calls, mounts, logs."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field

from modal_proto import api_pb2

Status = api_pb2.GenericResult

_numbers = itertools.count(1)


def new_id(prefix: str) -> str:
    """An id as Modal's look: "fc-" and 22 characters."""
    return f"{prefix}-{next(_numbers):022d}"


@dataclass
class App:
    """An App, deployed, being deployed or stopped."""

    app_id: str
    name: str = ""
    state: int = api_pb2.APP_STATE_INITIALIZING
    tags: dict[str, str] = field(default_factory=dict)
    function_ids: dict[str, str] = field(default_factory=dict)

    @property
    def is_deployed(self) -> bool:
        return self.state == api_pb2.APP_STATE_DEPLOYED


@dataclass
class Function:
    """A function as its newest deployment defines it."""

    function_id: str
    app_id: str
    tag: str
    definition: api_pb2.Function = field(default_factory=api_pb2.Function)
    data: api_pb2.FunctionData = field(default_factory=api_pb2.FunctionData)
    gpus: list[str] = field(default_factory=list)
    handle: api_pb2.FunctionHandleMetadata = field(default_factory=api_pb2.FunctionHandleMetadata)


@dataclass
class LogEntry:
    """What a container wrote at once."""

    at: float
    source: int
    text: str
    call_id: str
    input_id: str
    task_id: str


@dataclass
class Call:
    """A call with its one input.

    Attributes:
        task_id: of the container it is in; "" while it waits for one.
        retry_count: how often it has failed and was tried again.
        starts: containers it has had.
        crashes: containers that ended without a word.
        held: it waits for a machine that does not come.
        result: None until it has ended.
    """

    call_id: str
    input_id: str
    function: Function
    put: api_pb2.FunctionInput
    created_at: float = field(default_factory=time.time)
    task_id: str = ""
    retry_count: int = 0
    starts: int = 0
    crashes: int = 0
    held: bool = False
    expired: bool = False
    result: api_pb2.GenericResult | None = None
    data_format: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def finish(self, result: api_pb2.GenericResult, data_format: int = 0) -> None:
        """End it, unless it has ended."""
        if self.result is None:
            self.result, self.data_format, self.task_id = result, data_format, ""
            self.ended.set()

    @property
    def status(self) -> int:
        return Status.GENERIC_STATUS_UNSPECIFIED if self.result is None else self.result.status


@dataclass
class World:
    """Everything the server knows."""

    apps: dict[str, App] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    mounts: dict[str, dict[str, str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    named_secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    images: dict[str, api_pb2.Image] = field(default_factory=dict)
    logs: list[LogEntry] = field(default_factory=list)

    def deployed(self, name: str) -> App | None:
        """The App that is deployed under a name."""
        return next((a for a in self.apps.values() if a.name == name and a.is_deployed), None)

    def calls_of(self, app: App) -> list[Call]:
        """The calls of an App, in the order they were made."""
        return [call for call in self.calls.values() if call.function.app_id == app.app_id]

    def clear(self) -> None:
        """Forget everything but what was sent: an SDK does not send a mount or an image twice."""
        for made in (self.apps, self.functions, self.calls, self.secrets, self.named_secrets):
            made.clear()
        self.logs.clear()
