"""The control plane of the fake Modal: what a client asks for."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator
from typing import Any

from fakes.modal_logs import LogHandlers
from fakes.modal_records import App, Call, Function, World, new_id
from fakes.modal_workers import Workers
from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from modal_proto import api_pb2

BUILDER = "2025.06"
GPUS = frozenset(
    ["T4", "L4", "A10G", "A100", "A100-40GB", "A100-80GB", "L40S", "H100", "H200", "B200"]
)
DAY_S = 86_400


class ControlPlane(LogHandlers):
    """Handlers of the RPCs that the SDK sends from outside.

    Attributes:
        image_error: what the next build of an image fails with.
        hold: new calls wait for a machine that does not come.
    """

    def __init__(self, world: World, workers: Workers) -> None:
        super().__init__(world)
        self.workers = workers
        self.image_error = ""
        self.hold = False

    def ClientHello(self, _request: Any) -> api_pb2.ClientHelloResponse:
        return api_pb2.ClientHelloResponse(image_builder_version=BUILDER)

    def EnvironmentGetOrCreate(self, request: Any) -> api_pb2.EnvironmentGetOrCreateResponse:
        name = request.deployment_name or "main"
        if name not in ("main", "dev"):
            raise GRPCError(Status.NOT_FOUND, f"Environment '{name}' not found.")
        settings = api_pb2.EnvironmentSettings(image_builder_version=BUILDER)
        metadata = api_pb2.EnvironmentMetadata(name=name, settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    # -- Apps ----------------------------------------------------------------------------------

    def AppGetByDeploymentName(self, request: Any) -> api_pb2.AppGetByDeploymentNameResponse:
        app = self.world.deployed(request.name)
        return api_pb2.AppGetByDeploymentNameResponse(app_id=app.app_id if app else "")

    def AppGetOrCreate(self, request: Any) -> api_pb2.AppGetOrCreateResponse:
        app = self.world.deployed(request.app_name)
        if app is None:
            raise GRPCError(Status.NOT_FOUND, f"App '{request.app_name}' not found.")
        return api_pb2.AppGetOrCreateResponse(app_id=app.app_id)

    def AppCreate(self, request: Any) -> api_pb2.AppCreateResponse:
        app = App(new_id("ap"), tags=dict(request.tags))
        self.world.apps[app.app_id] = app
        return api_pb2.AppCreateResponse(app_id=app.app_id, app_page_url="http://modal/app")

    def AppGetLayout(self, request: Any) -> api_pb2.AppGetLayoutResponse:
        layout = api_pb2.AppLayout()
        for tag, function_id in self._app(request.app_id).function_ids.items():
            layout.function_ids[tag] = function_id
            handle = self.world.functions[function_id].handle
            layout.objects.add(object_id=function_id, function_handle_metadata=handle)
        return api_pb2.AppGetLayoutResponse(app_layout=layout)

    def AppPublish(self, request: Any) -> api_pb2.AppPublishResponse:
        app = self._app(request.app_id)
        app.name, app.state = request.name, request.app_state
        app.tags, app.function_ids = dict(request.tags), dict(request.function_ids)
        return api_pb2.AppPublishResponse(url="http://modal/app", deployed_at=time.time())

    def AppGetTags(self, request: Any) -> api_pb2.AppGetTagsResponse:
        return api_pb2.AppGetTagsResponse(tags=self._app(request.app_id).tags)

    def AppHeartbeat(self, _request: Any) -> Empty:
        return Empty()

    def AppClientDisconnect(self, _request: Any) -> Empty:
        return Empty()

    async def AppStop(self, request: Any) -> Empty:
        app = self._app(request.app_id)
        app.state = api_pb2.APP_STATE_STOPPED
        for call in self.world.calls_of(app):
            await self._terminate(call)
        return Empty()

    # -- images, mounts and secrets ------------------------------------------------------------

    def ImageGetOrCreate(self, request: Any) -> api_pb2.ImageGetOrCreateResponse:
        digest = hashlib.sha256(request.image.SerializeToString()).hexdigest()
        image_id = f"im-{digest[:22]}"
        self.world.images[image_id] = request.image
        return api_pb2.ImageGetOrCreateResponse(image_id=image_id)

    async def ImageJoinStreaming(
        self, _request: Any
    ) -> AsyncIterator[api_pb2.ImageJoinStreamingResponse]:
        status = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
        if self.image_error:
            status = api_pb2.GenericResult.GENERIC_STATUS_FAILURE
        yield api_pb2.ImageJoinStreamingResponse(
            result=api_pb2.GenericResult(status=status, exception=self.image_error),
            metadata=api_pb2.ImageMetadata(image_builder_version=BUILDER),
            eof=True,
        )

    def MountGetOrCreate(self, request: Any) -> api_pb2.MountGetOrCreateResponse:
        files = {file.filename: file.sha256_hex for file in request.files}
        mount_id = new_id("mo")
        self.world.mounts[mount_id] = files
        return api_pb2.MountGetOrCreateResponse(
            mount_id=mount_id, handle_metadata=api_pb2.MountHandleMetadata()
        )

    def MountBatchedCheckExistence(self, request: Any) -> Any:
        missing = [name for name in request.sha256_hex_hashes if name not in self.world.files]
        return api_pb2.MountBatchedCheckExistenceResponse(missing_sha256_hex_hashes=missing)

    def MountPutFile(self, request: Any) -> api_pb2.MountPutFileResponse:
        if request.WhichOneof("data_oneof") is not None:
            self.world.files[request.sha256_hex] = request.data
        return api_pb2.MountPutFileResponse(exists=request.sha256_hex in self.world.files)

    def SecretGetOrCreate(self, request: Any) -> api_pb2.SecretGetOrCreateResponse:
        values = dict(request.env_dict)
        if request.deployment_name:
            if request.deployment_name not in self.world.named_secrets:
                message = f"Secret '{request.deployment_name}' not found in environment 'main'."
                raise GRPCError(Status.NOT_FOUND, message)
            values = self.world.named_secrets[request.deployment_name]
        secret_id = new_id("st")
        self.world.secrets[secret_id] = values
        return api_pb2.SecretGetOrCreateResponse(secret_id=secret_id)

    # -- functions -----------------------------------------------------------------------------

    def FunctionPrecreate(self, request: Any) -> api_pb2.FunctionPrecreateResponse:
        function_id = request.existing_function_id or new_id("fu")
        handle = api_pb2.FunctionHandleMetadata(
            function_name=request.function_name,
            function_type=request.function_type,
            supported_input_formats=request.supported_input_formats,
            supported_output_formats=request.supported_output_formats,
            app_id=request.app_id,
            definition_id=new_id("de"),
        )
        if function_id not in self.world.functions:
            function = Function(function_id, request.app_id, request.function_name)
            self.world.functions[function_id] = function
        self.world.functions[function_id].handle = handle
        return api_pb2.FunctionPrecreateResponse(function_id=function_id, handle_metadata=handle)

    def FunctionCreate(self, request: Any) -> api_pb2.FunctionCreateResponse:
        function = self.world.functions[request.existing_function_id]
        ranked = [one.function for one in request.function_data.ranked_functions]
        definitions = ranked or [request.function]
        for definition in definitions:
            _check_definition(definition)
        function.definition = definitions[0]
        function.gpus = [_gpu_text(definition) for definition in definitions]
        function.data = api_pb2.FunctionData(timeout_secs=function.definition.timeout_secs)
        for rank, definition in enumerate(definitions):
            function.data.ranked_functions.add(rank=rank, function=definition)
        return api_pb2.FunctionCreateResponse(
            function_id=function.function_id,
            function=function.definition,
            function_data=function.data,
            handle_metadata=function.handle,
        )

    def FunctionGet(self, request: Any) -> api_pb2.FunctionGetResponse:
        app = self.world.deployed(request.app_name)
        function_id = app.function_ids.get(request.object_tag) if app else None
        if function_id is None:
            what = f"Function '{request.object_tag}' of App '{request.app_name}'"
            raise GRPCError(Status.NOT_FOUND, f"{what} not found in environment 'main'.")
        function = self.world.functions[function_id]
        return api_pb2.FunctionGetResponse(
            function_id=function_id, handle_metadata=function.handle, function=function.data
        )

    def FunctionGetCurrentStats(self, request: Any) -> api_pb2.FunctionStats:
        calls = [
            c
            for c in self.world.calls.values()
            if c.function.function_id == request.function_id and c.result is None
        ]
        running = sum(bool(call.task_id) for call in calls)
        return api_pb2.FunctionStats(
            backlog=len(calls) - running, num_total_tasks=running, num_running_inputs=running
        )

    # -- calls ---------------------------------------------------------------------------------

    def FunctionMap(self, request: Any) -> api_pb2.FunctionMapResponse:
        function = self.world.functions[request.function_id]
        if not self._app(function.app_id).is_deployed:
            raise GRPCError(Status.FAILED_PRECONDITION, "The App is stopped.")
        (item,) = request.pipelined_inputs
        call = Call(new_id("fc"), new_id("in"), function, item.input, held=self.hold)
        self.world.calls[call.call_id] = call
        self.workers.enqueue(call)
        response = api_pb2.FunctionMapResponse(function_call_id=call.call_id)
        response.pipelined_inputs.add(idx=item.idx, input_id=call.input_id)
        return response

    async def FunctionGetOutputs(self, request: Any) -> api_pb2.FunctionGetOutputsResponse:
        call = self._call(request.function_call_id)
        if call.expired:
            return api_pb2.FunctionGetOutputsResponse(num_unfinished_inputs=0)
        if request.timeout > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(call.ended.wait(), request.timeout)
        if call.result is None:
            return api_pb2.FunctionGetOutputsResponse(num_unfinished_inputs=1)
        response = api_pb2.FunctionGetOutputsResponse()
        response.outputs.add(
            result=call.result, data_format=call.data_format, input_id=call.input_id
        )
        return response

    def FunctionGetCallGraph(self, request: Any) -> api_pb2.FunctionGetCallGraphResponse:
        call = self._call(request.function_call_id)
        response = api_pb2.FunctionGetCallGraphResponse()
        response.inputs.add(
            input_id=call.input_id,
            status=call.status,
            function_call_id=call.call_id,
            task_id=call.task_id,
        )
        response.function_calls.add(function_call_id=call.call_id, function_name=call.function.tag)
        return response

    async def FunctionCallCancel(self, request: Any) -> Empty:
        call = self._call(request.function_call_id)
        if request.terminate_containers:
            await self._terminate(call)
        elif not self.workers.ask_to_cancel(call):
            call.finish(
                api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_TERMINATED)
            )
        return Empty()

    async def _terminate(self, call: Call) -> None:
        status = api_pb2.GenericResult.GENERIC_STATUS_TERMINATED
        call.finish(api_pb2.GenericResult(status=status))
        await self.workers.kill(call)

    def _app(self, app_id: str) -> App:
        return self.world.apps[app_id]


def _gpu_text(definition: api_pb2.Function) -> str:
    config = definition.resources.gpu_config
    return f"{config.gpu_type}:{config.count}" if config.gpu_type else ""


def _check_definition(definition: api_pb2.Function) -> None:
    """What Modal itself checks."""
    gpu = definition.resources.gpu_config.gpu_type
    if gpu and gpu not in GPUS:
        raise GRPCError(Status.INVALID_ARGUMENT, f"GPU type '{gpu}' is not supported.")
    if not 1 <= definition.timeout_secs <= DAY_S:
        raise GRPCError(Status.INVALID_ARGUMENT, "timeout must be between 1 second and 24 hours")
    if definition.retry_policy.retries > 10:
        raise GRPCError(Status.INVALID_ARGUMENT, "retries must be at most 10")
    if any(region == "nowhere" for region in definition.scheduler_placement.regions):
        raise GRPCError(Status.INVALID_ARGUMENT, "Unknown region 'nowhere'.")
