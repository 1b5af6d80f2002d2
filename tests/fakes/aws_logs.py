"""CloudWatch Logs: streams of lines, read in pages by tokens."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from fakes.aws_errors import AwsError

GROUP = "/aws/sagemaker/TrainingJobs"


@dataclass
class Stream:
    """One container's output."""

    name: str
    created_ms: int
    events: list[dict[str, Any]] = field(default_factory=list)


class Logs:
    """All streams of the one group there is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[str, Stream] = {}
        #: Events in a page at most, whatever is asked for; small, so that readers must turn pages.
        self.page = 50

    def open(self, job: str) -> Stream:
        """A new stream of a job."""
        with self._lock:
            now = int(time.time() * 1000)
            stream = Stream(f"{job}/algo-1-{now}-{len(self._streams)}", now)
            self._streams[stream.name] = stream
            return stream

    def write(self, stream: Stream, line: str) -> None:
        """Add a line, without its end; an empty one is no event."""
        if line:
            now = int(time.time() * 1000)
            event = {"timestamp": now, "ingestionTime": now, "message": line}
            with self._lock:
                stream.events.append(event)

    def streams(self) -> list[Stream]:
        """All of them, the oldest first."""
        with self._lock:
            return list(self._streams.values())

    def DescribeLogStreams(self, params: dict[str, Any]) -> dict[str, Any]:
        self._check_group(params)
        prefix = params.get("logStreamNamePrefix", "")
        with self._lock:
            found = sorted(name for name in self._streams if name.startswith(prefix))
            start = int(params.get("nextToken", "0"))
            page = found[start : start + 2]
            answer: dict[str, Any] = {
                "logStreams": [
                    {"logStreamName": name, "creationTime": self._streams[name].created_ms}
                    for name in page
                ]
            }
        if start + 2 < len(found):
            answer["nextToken"] = str(start + 2)
        return answer

    def GetLogEvents(self, params: dict[str, Any]) -> dict[str, Any]:
        self._check_group(params)
        with self._lock:
            stream = self._streams.get(params["logStreamName"])
            if stream is None:
                raise AwsError("ResourceNotFoundException", "The specified log stream is missing.")
            events = list(stream.events)
        limit = min(params.get("limit", 10_000), self.page)
        token = params.get("nextToken")
        if token is not None:
            direction, _, place = token.partition("/")
            begin = int(place) if direction == "f" else max(0, int(place) - limit)
            end = min(begin + limit, len(events)) if direction == "f" else int(place)
        elif params.get("startFromHead"):
            since = params.get("startTime", 0)
            begin = sum(event["timestamp"] < since for event in events)
            end = min(begin + limit, len(events))
        else:
            begin, end = max(0, len(events) - limit), len(events)
        return {
            "events": events[begin:end],
            "nextForwardToken": f"f/{end}",
            "nextBackwardToken": f"b/{begin}",
        }

    def _check_group(self, params: dict[str, Any]) -> None:
        if params["logGroupName"] != GROUP or not self._streams:
            raise AwsError("ResourceNotFoundException", "The specified log group does not exist.")
