"""The machines of the fake Modal: containers that are real processes of this one.

Each runs Modal's own program for containers, from the wheel, in an environment that holds nothing
of the test's, with the mounts of its function as files.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakes.modal_records import Call, LogEntry, World, new_id
from fakes.modal_rpc import TASK_HEADER
from google.protobuf.empty_pb2 import Empty
from modal_proto import api_pb2

#: Containers that may crash before a call is given up.
MOST_CRASHES = 3
#: Seconds a heartbeat is held, so that a cancellation is heard of at once.
HEARTBEAT_S = 5.0
#: Seconds between the signal of a preemption and the end by force.
GRACE_S = 30.0
_FAILURES = (
    api_pb2.GenericResult.GENERIC_STATUS_FAILURE,
    api_pb2.GenericResult.GENERIC_STATUS_TIMEOUT,
)


@dataclass
class Container:
    """One container, which serves one call and ends."""

    task_id: str
    call: Call
    process: asyncio.subprocess.Process | None = None
    fetched: bool = False
    is_over: bool = False
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    told: bool = False
    failure: api_pb2.GenericResult | None = None
    oom: bool = False


class Workers:
    """Starts a container for each call, and again for as long as it has no result.

    Args:
        world: what the server knows.
        directory: for mounts and arguments.

    Attributes:
        url: of the server.
        grace_s: seconds between the signal of a preemption and the end by force.
        containers: by id, ended ones too.
    """

    def __init__(self, world: World, directory: Path) -> None:
        self.world = world
        self.directory = directory
        self.url = ""
        self.grace_s = GRACE_S
        self.containers: dict[str, Container] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._queue: list[Call] = []

    # -- what containers ask -------------------------------------------------------------------

    def ContainerHello(self, _request: Any, _task_id: str) -> Empty:
        return Empty()

    async def ContainerHeartbeat(
        self, _request: Any, task_id: str
    ) -> api_pb2.ContainerHeartbeatResponse:
        container = self.containers[task_id]
        response = api_pb2.ContainerHeartbeatResponse()
        if not container.told:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(container.cancelled.wait(), HEARTBEAT_S)
            if container.cancelled.is_set() and container.fetched:
                container.told = True
                response.cancel_input_event.input_ids.append(container.call.input_id)
        else:
            await asyncio.sleep(HEARTBEAT_S)
        return response

    async def FunctionGetInputs(
        self, _request: Any, task_id: str
    ) -> api_pb2.FunctionGetInputsResponse:
        container = self.containers[task_id]
        response = api_pb2.FunctionGetInputsResponse()
        if container.fetched or container.call.result is not None:
            response.inputs.add(kill_switch=True)
            return response
        container.fetched = True
        call = container.call
        call.task_id = task_id
        response.inputs.add(
            input_id=call.input_id,
            input=call.put,
            function_call_id=call.call_id,
            function_call_invocation_type=api_pb2.FUNCTION_CALL_INVOCATION_TYPE_ASYNC,
            retry_count=call.retry_count,
        )
        return response

    def FunctionPutOutputs(self, request: Any, task_id: str) -> Empty:
        call = self.containers[task_id].call
        for item in request.outputs:
            if item.result.status in _FAILURES and self._may_retry(call):
                call.retry_count += 1
            else:
                call.finish(item.result, item.data_format)
        self.containers[task_id].is_over = True
        return Empty()

    def TaskResult(self, request: Any, task_id: str) -> Empty:
        self.containers[task_id].failure = request.result
        return Empty()

    # -- what the test and the control plane ask -----------------------------------------------

    def enqueue(self, call: Call) -> None:
        """Start a container for a call, unless it is held."""
        if not call.held:
            task = asyncio.get_running_loop().create_task(self._serve(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def running(self, call: Call) -> Container | None:
        """The container that a call is in."""
        return next((c for c in self.containers.values() if c.call is call and _is_alive(c)), None)

    def ask_to_cancel(self, call: Call) -> bool:
        """Tell a call's container; False where it has none that has begun."""
        container = self.running(call)
        if container is None or not container.fetched:
            return False
        container.cancelled.set()
        return True

    async def preempt(self, call: Call) -> None:
        """Take a call's machine: SIGINT, then SIGKILL after the grace."""
        container = self.running(call)
        process = None if container is None else container.process
        assert process is not None, "it has no container"
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), self.grace_s)
        _kill_session(process.pid)

    async def expire(self, call: Call) -> None:
        """Modal's own time limit: the container is ended, and the call has failed or is retried."""
        result = api_pb2.GenericResult(
            status=api_pb2.GenericResult.GENERIC_STATUS_TIMEOUT,
            exception="Task's current input hit its timeout",
        )
        if self._may_retry(call):
            call.retry_count += 1
        else:
            call.finish(result)
        await self.kill(call)

    async def kill(self, call: Call) -> None:
        """End a call's container by force."""
        container = self.running(call)
        if container is not None and container.process is not None:
            _kill_session(container.process.pid)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(container.process.wait(), 10.0)

    async def close(self) -> None:
        """End all containers."""
        for call in self.world.calls.values():
            call.finish(api_pb2.GenericResult())
        for container in list(self.containers.values()):
            if container.process is not None:
                _kill_session(container.process.pid)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- containers ----------------------------------------------------------------------------

    async def _serve(self, call: Call) -> None:
        """Run containers until the call has ended."""
        while call.result is None:
            container = Container(new_id("ta"), call)
            self.containers[container.task_id] = container
            call.starts += 1
            try:
                await self._run(container)
            finally:
                if call.task_id == container.task_id:
                    call.task_id = ""
            if call.result is None and not container.fetched:
                call.crashes += 1
                if call.crashes >= MOST_CRASHES:
                    self._give_up(call, container)

    async def _run(self, container: Container) -> None:
        root = self._mounted(container.call)
        arguments = self.directory / f"{container.task_id}.args"
        arguments.write_bytes(self._arguments(container).SerializeToString())
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "modal._container_entrypoint"),
            cwd=root,
            env=self._environment(container, arguments, root),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        container.process = process
        readers = asyncio.gather(
            self._keep(container, process.stdout, api_pb2.FILE_DESCRIPTOR_STDOUT),
            self._keep(container, process.stderr, api_pb2.FILE_DESCRIPTOR_STDERR),
        )
        try:
            await process.wait()
        finally:
            _kill_session(process.pid)
            await readers

    async def _keep(self, container: Container, stream: Any, source: int) -> None:
        while line := await stream.readline():
            call = container.call
            text = line.decode(errors="replace")
            entry = LogEntry(
                time.time(), source, text, call.call_id, call.input_id, container.task_id
            )
            self.world.logs.append(entry)

    def _arguments(self, container: Container) -> api_pb2.ContainerArguments:
        function = container.call.function
        app = self.world.apps[function.app_id]
        layout = api_pb2.AppLayout(function_ids=app.function_ids)
        layout.objects.add(object_id=function.function_id, function_handle_metadata=function.handle)
        for dependency in function.definition.object_dependencies:
            layout.objects.add(object_id=dependency.object_id)
        return api_pb2.ContainerArguments(
            task_id=container.task_id,
            function_id=function.function_id,
            app_id=app.app_id,
            function_def=function.definition,
            environment_name="main",
            app_layout=layout,
        )

    def _environment(self, container: Container, arguments: Path, root: Path) -> dict[str, str]:
        secrets: dict[str, str] = {}
        for secret_id in container.call.function.definition.secret_ids:
            secrets |= self.world.secrets[secret_id]
        return {
            "PATH": os.defpath,
            "HOME": str(root),
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(root),
            "MODAL_IS_REMOTE": "1",
            "MODAL_SERVER_URL": self.url,
            "MODAL_TASK_ID": container.task_id,
            "MODAL_CONTAINER_ARGUMENTS_PATH": str(arguments),
            "MODAL_OVERRIDE_HEADERS": f"{TASK_HEADER}:{container.task_id}",
            **secrets,
        }

    def _mounted(self, call: Call) -> Path:
        """The directory that stands for /root of a container, with what is mounted there.

        Containers that have the same files share it, and what Python compiles there.
        """
        files: dict[str, str] = {}
        for mount_id in call.function.definition.mount_ids:
            files |= self.world.mounts[mount_id]
        name = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:22]
        root = self.directory / f"root-{name}"
        if not root.exists():
            root.mkdir()
            for file, digest in files.items():
                path = root / Path(file).relative_to("/root")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.world.files[digest])
        return root

    def _may_retry(self, call: Call) -> bool:
        return call.retry_count < call.function.definition.retry_policy.retries

    def _give_up(self, call: Call, container: Container) -> None:
        """A function whose containers do not start fails its calls, in the end."""
        result = api_pb2.GenericResult()
        if container.failure is not None:
            result.CopyFrom(container.failure)
        result.status = api_pb2.GenericResult.GENERIC_STATUS_INIT_FAILURE
        call.finish(result)


def _is_alive(container: Container) -> bool:
    return container.process is not None and container.process.returncode is None


def _kill_session(pid: int) -> None:
    """SIGKILL to every process of a container: those of the session that its first one leads."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[3]) == pid:
                    os.kill(int(entry.name), signal.SIGKILL)
