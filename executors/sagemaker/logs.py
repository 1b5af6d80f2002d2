"""What replicas print, as CloudWatch keeps it.

Each container of a job writes a stream of its own, named "<job>/algo-1-<time>": a spot job that was
interrupted has several.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from diloco_cloud.executors.sagemaker.faults import code_of

GROUP: Final = "/aws/sagemaker/TrainingJobs"
#: Events that one request brings at most.
_MOST_EVENTS: Final = 10_000


def tail(client: Any, job: str, n_lines: int) -> str:
    """The last ``n_lines`` lines of a job's stdout and stderr; "" where there are none."""
    lines: list[str] = []
    for stream in reversed(_streams(client, job)) if n_lines > 0 else ():
        wanted = n_lines - len(lines)
        lines = _last_lines(client, stream, wanted) + lines
        if len(lines) >= n_lines:
            break
    return "".join(f"{line}\n" for line in lines[-n_lines:]) if n_lines > 0 else ""


class LogFollower:
    """Reads a job's log from the beginning on, each line once.

    Args:
        client: of CloudWatch Logs.
        job: name of the training job.
        since: seconds since the epoch; None: from its beginning.
    """

    def __init__(self, client: Any, job: str, since: float | None = None) -> None:
        self._client = client
        self._job = job
        self._start = {} if since is None else {"startTime": max(0, int(since * 1000))}
        self._tokens: dict[str, str] = {}

    def read_new(self) -> Iterator[str]:
        """Lines that have come since the last call; what was read is known even if it raises."""
        for stream in _streams(self._client, self._job):
            while True:
                token = self._tokens.get(stream)
                page = self._client.get_log_events(
                    logGroupName=GROUP,
                    logStreamName=stream,
                    startFromHead=True,
                    **({"nextToken": token} if token else self._start),
                )
                self._tokens[stream] = page["nextForwardToken"]
                yield from (str(event["message"]) for event in page["events"])
                if page["nextForwardToken"] == token:  # what there is has been read
                    break


def _streams(client: Any, job: str) -> list[str]:
    """Names of a job's streams, the oldest first."""
    pages = client.get_paginator("describe_log_streams").paginate(
        logGroupName=GROUP, logStreamNamePrefix=f"{job}/"
    )
    try:
        found = [stream for page in pages for stream in page["logStreams"]]
    except client.exceptions.ClientError as error:
        if code_of(error) == "ResourceNotFoundException":  # nobody has ever trained here
            return []
        raise
    found.sort(key=lambda stream: (stream.get("creationTime", 0), stream["logStreamName"]))
    return [str(stream["logStreamName"]) for stream in found]


def _last_lines(client: Any, stream: str, n_lines: int) -> list[str]:
    lines: list[str] = []
    token: str | None = None
    while len(lines) < n_lines:
        page = client.get_log_events(
            logGroupName=GROUP,
            logStreamName=stream,
            startFromHead=False,
            limit=min(n_lines, _MOST_EVENTS),
            **({"nextToken": token} if token else {}),
        )
        lines = [str(event["message"]) for event in page["events"]] + lines
        if page["nextBackwardToken"] == token:
            break
        token = page["nextBackwardToken"]
    return lines[-n_lines:]
