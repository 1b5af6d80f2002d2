"""The logs of the fake Modal."""

from __future__ import annotations

from typing import Any

from fakes.modal_records import Call, LogEntry, World
from grpclib import GRPCError, Status
from modal_proto import api_pb2


class LogHandlers:
    """Handlers of the RPCs about logs, and about single calls."""

    def __init__(self, world: World) -> None:
        self.world = world

    def FunctionCallFromId(self, request: Any) -> api_pb2.FunctionCallFromIdResponse:
        call = self._call(request.function_call_id)
        metadata = api_pb2.FunctionCallHandleMetadata(
            app_id=call.function.app_id, function_id=call.function.function_id
        )
        return api_pb2.FunctionCallFromIdResponse(
            function_call_id=call.call_id, num_inputs=1, metadata=metadata
        )

    def FunctionCallGetInfo(self, request: Any) -> api_pb2.FunctionCallGetInfoResponse:
        call = self._call(request.function_call_id)
        info = api_pb2.FunctionCallInfo(
            function_call_id=call.call_id, created_at=call.created_at, total_inputs=1
        )
        return api_pb2.FunctionCallGetInfoResponse(info=info)

    def AppCountLogs(self, request: Any) -> api_pb2.AppCountLogsResponse:
        response = api_pb2.AppCountLogsResponse(app_id=request.app_id)
        width = request.bucket_secs
        counts: dict[int, int] = {}
        for entry in self._entries(request):
            start = int(entry.at // width * width)
            counts[start] = counts.get(start, 0) + 1
        for start, count in sorted(counts.items()):
            bucket = response.buckets.add(stdout_logs=count)
            bucket.bucket_start_at.FromSeconds(start)
        return response

    def AppFetchLogs(self, request: Any) -> api_pb2.AppFetchLogsResponse:
        response = api_pb2.AppFetchLogsResponse()
        for entry in self._entries(request)[-request.limit :]:
            batch = response.batches.add(task_id=entry.task_id, input_id=entry.input_id)
            batch.items.add(
                data=entry.text,
                timestamp=entry.at,
                timestamp_ns=int(entry.at * 1e9),
                file_descriptor=entry.source,
                function_call_id=entry.call_id,
                input_id=entry.input_id,
                container_id=entry.task_id,
            )
        return response

    def _entries(self, request: Any) -> list[LogEntry]:
        since, until = request.since.ToNanoseconds() / 1e9, request.until.ToNanoseconds() / 1e9
        calls = self.world.calls
        return [
            entry
            for entry in self.world.logs
            if since <= entry.at < until
            and calls[entry.call_id].function.app_id == request.app_id
            and request.function_call_id in ("", entry.call_id)
            and request.search_text in entry.text
        ]

    def _call(self, call_id: str) -> Call:
        call = self.world.calls.get(call_id)
        if call is None:
            raise GRPCError(Status.NOT_FOUND, f"Function call {call_id} not found.")
        return call
