"""Serves Modal's gRPC interface: every request is recorded, and any of them may go wrong.

A handler is a method with the name of an RPC that takes the request and returns the response. An
RPC without one is answered UNIMPLEMENTED, so that what the fake lacks is never passed over.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from grpclib import GRPCError, Status
from modal_proto.api_grpc import ModalClientBase

#: Tells which container a request is from; workers of the real thing know it by the connection.
TASK_HEADER = "x-fake-task"
#: Requests that make something: repeated with the same key, they make it once.
_CREATING = frozenset({"FunctionMap", "AppCreate", "FunctionCreate", "AppPublish"})


@dataclass
class Fault:
    """Something that goes wrong in the next requests of one kind.

    Attributes:
        rpc: which, by name; "*" for all.
        times: how often.
        skip: requests that go well before.
        after: the request is carried out, and its reply is lost.
        status, message: of the answer; without a status, there is none.
    """

    rpc: str
    times: int = 1
    skip: int = 0
    after: bool = False
    status: Status | None = Status.UNAVAILABLE
    message: str = "the service is not available"


class Servicer(ModalClientBase):
    """All RPCs, handed to ``handlers``.

    Args:
        control: has methods named like the RPCs of clients.
        workers: has methods named like the RPCs of containers, which also take the container's id.
        token: id and secret that clients must send.

    Attributes:
        requests: name and bytes of every request so far, in order.
        faults: those to come.
        token: changed by a test that lets it expire.
    """

    def __init__(self, control: Any, workers: Any, token: tuple[str, str]) -> None:
        self._control = control
        self._workers = workers
        self._answered: dict[tuple[str, str], Any] = {}
        self.requests: list[tuple[str, bytes]] = []
        self.faults: list[Fault] = []
        self.token = token

    def reset(self, token: tuple[str, str]) -> None:
        """Forget what was asked and what was to go wrong."""
        self.requests.clear()
        self.faults.clear()
        self._answered.clear()
        self.token = token

    async def answer(self, rpc: str, stream: Any) -> None:
        request = await stream.recv_message()
        metadata = stream.metadata
        self.requests.append((rpc, request.SerializeToString()))
        task_id = metadata.get(TASK_HEADER)
        if task_id is None:
            self._authenticate(metadata)
            await self._fail(rpc, after=False)
        handler = getattr(self._control if task_id is None else self._workers, rpc, None)
        if handler is None:
            raise GRPCError(Status.UNIMPLEMENTED, f"the fake has no {rpc}")
        key = (rpc, str(metadata.get("x-idempotency-key")))
        if key in self._answered:
            await self._fail(rpc, after=True)
            await stream.send_message(self._answered[key])
            return
        response = handler(request, task_id) if task_id is not None else handler(request)
        if isinstance(response, AsyncIterator):
            async for part in response:
                await stream.send_message(part)
            return
        if inspect.isawaitable(response):
            response = await response
        if rpc in _CREATING:
            self._answered[key] = response
        if task_id is None:
            await self._fail(rpc, after=True)
        await stream.send_message(response)

    def _authenticate(self, metadata: Any) -> None:
        given = (metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret"))
        if given != self.token:
            raise GRPCError(Status.UNAUTHENTICATED, "Token not found or expired.")

    async def _fail(self, rpc: str, *, after: bool) -> None:
        for fault in self.faults:
            if fault.rpc not in (rpc, "*") or fault.after != after or fault.times == 0:
                continue
            if fault.skip > 0:
                fault.skip -= 1
                continue
            fault.times -= 1
            if fault.status is None:
                await asyncio.sleep(3600)
                return
            raise GRPCError(fault.status, fault.message)


def _rpc(name: str) -> Any:
    async def rpc(self: Servicer, stream: Any) -> None:
        await self.answer(name, stream)

    return rpc


for _name in ModalClientBase.__abstractmethods__:
    setattr(Servicer, _name, _rpc(_name))
Servicer.__abstractmethods__ = frozenset()
