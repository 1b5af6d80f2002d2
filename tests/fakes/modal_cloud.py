"""A Modal of our own on a socket of this machine, for the real SDK to talk to."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from fakes.modal_control import ControlPlane
from fakes.modal_records import Call, World
from fakes.modal_rpc import Fault, Servicer
from fakes.modal_workers import GRACE_S, Workers
from grpclib import Status
from grpclib.server import Server
from modal_proto import api_pb2

T = TypeVar("T")


class _Server(Server):
    """A server that can cut its connections, too."""

    def __init__(self, servicer: Servicer) -> None:
        super().__init__([servicer])
        self._connections: list[Any] = []

    def _protocol_factory(self) -> Any:
        self._connections.append(super()._protocol_factory())
        return self._connections[-1]

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        return port

    async def cut(self) -> None:
        self.close()
        for protocol in self._connections:
            transport = getattr(getattr(protocol, "connection", None), "_transport", None)
            if transport is not None:  # it is still open
                transport.abort()
        await self.wait_closed()


TOKEN = ("ak-fake", "as-fake")


class FakeModal:
    """The whole of it; made by :func:`fake_modal`. Its methods may be called from any thread.

    Attributes:
        world: what it knows, for tests to look at.
        env: what an SDK needs in its environment to come here.
    """

    def __init__(self, directory: Path, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._server: _Server | None = None
        self.world = World()
        self.workers = Workers(self.world, directory)
        self.control = ControlPlane(self.world, self.workers)
        self.servicer = Servicer(self.control, self.workers, TOKEN)
        self.port = 0

    @property
    def env(self) -> dict[str, str]:
        return {
            "MODAL_SERVER_URL": f"http://127.0.0.1:{self.port}",
            "MODAL_TOKEN_ID": TOKEN[0],
            "MODAL_TOKEN_SECRET": TOKEN[1],
            # Somebody may be at work on the sources that are being sent.
            "MODAL_BUILD_VALIDATION": "ignore",
        }

    @property
    def requests(self) -> list[tuple[str, bytes]]:
        """Name and bytes of every request so far."""
        return self.servicer.requests

    def count(self, rpc: str) -> int:
        """How many requests of one kind have come."""
        return sum(name == rpc for name, _ in self.requests)

    def calls(self) -> list[Call]:
        """All calls, in the order they were made."""
        return list(self.world.calls.values())

    def fail(
        self,
        rpc: str,
        *,
        times: int = 1,
        skip: int = 0,
        after: bool = False,
        status: Status = Status.UNAVAILABLE,
        message: str = "the service is not available",
    ) -> None:
        """Let requests go wrong: before they are carried out, or after, when the reply is lost."""
        self.servicer.faults.append(Fault(rpc, times, skip, after, status, message))

    def stall(self, rpc: str, *, skip: int = 0) -> None:
        """Carry out a request, and say nothing."""
        self.servicer.faults.append(Fault(rpc, 1, skip, after=True, status=None))

    def expire_token(self) -> None:
        """From now on, nobody is let in."""
        self.servicer.token = ("ak-other", "as-other")

    def hold(self, *, new_calls: bool) -> None:
        """Whether there is no machine for new calls."""
        self.control.hold = new_calls

    def release(self) -> None:
        """Find machines for the calls that wait for one."""
        self.control.hold = False

        async def release() -> None:
            for call in self.calls():
                if call.held:
                    call.held = False
                    self.workers.enqueue(call)

        self._do(release())

    def preempt(self, call: Call) -> None:
        """Take a call's machine away; returns when its container has ended."""
        self._do(self.workers.preempt(call))

    def expire(self, call: Call) -> None:
        """Let a call's time be up."""
        self._do(self.workers.expire(call))

    def end(self, call: Call, status: int, exception: str = "") -> None:
        """End a call as Modal itself does, without a word from its function."""

        async def end() -> None:
            call.finish(api_pb2.GenericResult(status=status, exception=exception))
            await self.workers.kill(call)

        self._do(end())

    def forget_results(self) -> None:
        """As Modal does after seven days."""
        for call in self.calls():
            call.expired = True

    def log(self, call: Call) -> str:
        """All that the containers of a call have written."""
        return "".join(one.text for one in self.world.logs if one.call_id == call.call_id)

    def until(self, condition: Callable[[], T], seconds: float = 90.0) -> T:
        """What ``condition`` returns once it is true."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.05)
        return found

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """While this is entered, nobody can be reached; containers run on."""
        self._do(self._close_server())
        try:
            yield
        finally:
            self._do(self.listen(self.port))

    def reset(self) -> None:
        """Forget everything but the files that were sent: as new, for the next test."""

        async def reset() -> None:
            await self.workers.close()
            self.world.clear()
            self.workers.containers.clear()

        self._do(reset())
        self.servicer.reset(TOKEN)
        self.control.hold, self.control.image_error = False, ""
        self.workers.grace_s = GRACE_S

    async def listen(self, port: int) -> None:
        self._server = _Server(self.servicer)
        await self._server.start("127.0.0.1", port)
        self.port = self._server.port
        self.workers.url = self.env["MODAL_SERVER_URL"]

    async def close(self) -> None:
        await self.workers.close()
        await self._close_server()

    async def _close_server(self) -> None:
        assert self._server is not None
        await self._server.cut()

    def _do(self, action: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(action, self._loop).result(120)


@contextlib.contextmanager
def fake_modal() -> Iterator[FakeModal]:
    """Run one until the block ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fake-modal", daemon=True)
    thread.start()
    with tempfile.TemporaryDirectory(prefix="modal-", ignore_cleanup_errors=True) as directory:
        cloud = FakeModal(Path(directory), loop)
        cloud._do(cloud.listen(0))
        try:
            yield cloud
        finally:
            cloud._do(cloud.close())
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()
