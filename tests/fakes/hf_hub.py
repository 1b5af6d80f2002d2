"""The Hugging Face Hub's API for jobs, over a socket, judging what it is asked by its own schema.

It runs every job for real, and can be told to misbehave: queue, refuse, lose replies, throttle,
hang, forget, and expire tokens. It records every request.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import jsonschema
from fakes.hf_job import OWNER_ID, TERMINAL, FakeJob

SCHEMA = json.loads(Path(__file__).with_name("hf_schema.json").read_text())
#: jsonschema.validate would check the schema each time, which takes longer than the answer.
RULES = {
    name: jsonschema.validators.validator_for(SCHEMA[name])(SCHEMA[name])
    for name in ("create_job", "job", "hardware")
}
HARDWARE = ("cpu-basic", "cpu-upgrade", "t4-small", "l4x1", "a10g-large", "a100-large", "h200")
PAGE = 3
_JOB = re.compile(r"/api/jobs/(?P<namespace>[^/]+)/(?P<job>[0-9a-f]{24})(?:/(?P<verb>\w+))?")


@dataclass
class Fault:
    """What happens to the next requests that match.

    Attributes:
        method: of the requests.
        path: a regular expression that their path matches.
        kind: "drop" (closes the connection), "lose" (acts, then closes it), "hang", "stall" (acts,
            then hangs), or a status.
        times: how many requests.
        skip: how many go well before.
    """

    method: str
    path: str
    kind: str | int
    times: int = 1
    skip: int = 0


@dataclass
class Recorded:
    """A request: everything but its credentials."""

    method: str
    path: str
    body: str


@dataclass
class _State:
    jobs: dict[str, FakeJob] = field(default_factory=dict)
    requests: list[Recorded] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    tokens: dict[str, str] = field(default_factory=dict)
    orgs: tuple[str, ...] = ()
    queueing: bool = False
    out: bool = False


class FakeHub:
    """The hub; see :func:`fake_hub`."""

    def __init__(
        self, *, token: str = "hf_test", user: str = "tester", grace_s: float = 3.0
    ) -> None:
        self.token = token
        self.user = user
        self.grace_s = grace_s
        self.state = _State(tokens={token: "write"}, orgs=("our-team",))
        self.lock = threading.Lock()
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def env(self) -> dict[str, str]:
        """What a client needs in its environment."""
        return {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": self.token}

    @property
    def jobs(self) -> list[FakeJob]:
        """All jobs, oldest first."""
        return list(self.state.jobs.values())

    @property
    def requests(self) -> list[Recorded]:
        return list(self.state.requests)

    def job_of(self, rank: int, attempt: int = 0) -> FakeJob:
        """The job of one life of a replica."""
        wanted = {"diloco-rank": str(rank), "diloco-attempt": str(attempt)}
        return next(job for job in self.jobs if wanted.items() <= job.spec["labels"].items())

    # -- what tests make it do ------------------------------------------------------------------

    def fault(
        self, method: str, path: str, kind: str | int, times: int = 1, *, skip: int = 0
    ) -> None:
        """Have the next requests go wrong."""
        self.state.faults.append(Fault(method, path, kind, times, skip))

    def queue(self, on: bool = True) -> None:
        """Place no jobs from now on, or all that wait and will come."""
        self.state.queueing = on
        if not on:
            for job in self.jobs:
                job.place()

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Answer nobody."""
        self.state.out = True
        try:
            yield
        finally:
            self.state.out = False

    def expire_tokens(self) -> None:
        """Accept no token any more."""
        self.state.tokens.clear()

    # -- its life -------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End all jobs, and the server."""
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
        for job in self.jobs:
            job.close()

    def hang(self) -> None:
        """Hold a request until the server ends."""
        self._released.wait(60)

    def take_fault(self, method: str, path: str) -> str | int | None:
        """What is to happen to a request, if anything."""
        with self.lock:
            for fault in self.state.faults:
                if not fault.times or fault.method != method or not re.search(fault.path, path):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault.kind
        return None

    def create(self, namespace: str, spec: dict[str, Any]) -> FakeJob:
        """Make a job of a request that the schema accepts."""
        RULES["create_job"].validate(spec)
        if ("dockerImage" in spec) == ("spaceId" in spec):
            raise jsonschema.ValidationError("one of dockerImage and spaceId is needed")
        job = FakeJob(secrets.token_hex(12), namespace, spec, self.grace_s)
        with self.lock:
            self.state.jobs[job.id] = job
        if not self.state.queueing:
            job.place()
        return job


@contextlib.contextmanager
def fake_hub(**options: Any) -> Iterator[FakeHub]:
    """Run a hub until the block ends."""
    hub = FakeHub(**options)
    hub.start()
    try:
        yield hub
    finally:
        hub.close()


class _Dropped(Exception):
    """The connection is to be closed without an answer."""


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        pass

    Handler.hub = hub
    return Handler


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def _serve(self, method: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length).decode()
        self.hub.state.requests.append(Recorded(method, self.path, body))
        try:
            if self.hub.state.out:
                raise _Dropped
            kind = self.hub.take_fault(method, self.path)
            if kind == "hang":
                self.hub.hang()
            if kind in ("drop", "hang"):
                raise _Dropped
            if isinstance(kind, int):
                self._answer({"error": f"told to answer {kind}"}, kind)
                return
            self._route(method, urlsplit(self.path), body, after=kind)
        except (_Dropped, BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _route(self, method: str, url: Any, body: str, *, after: str | None) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        role = self.hub.state.tokens.get(token)
        if url.path == "/api/jobs/hardware":
            self._answer([_hardware(name) for name in HARDWARE])
        elif not url.path.startswith(("/api/jobs/", "/api/whoami-v2")):
            self._answer({"error": "Not Found"}, 404)
        elif role is None:
            self._answer({"error": "Invalid credentials in Authorization header"}, 401)
        elif url.path == "/api/whoami-v2":
            self._answer(self._whoami(role))
        elif found := _JOB.fullmatch(url.path):
            self._job(method, found, parse_qs(url.query))
        elif method == "GET":
            self._list(url.path.rpartition("/")[2], url)
        else:
            self._create(url.path.rpartition("/")[2], body, role, after)

    def _whoami(self, role: str) -> dict[str, Any]:
        orgs = [{"type": "org", "name": name} for name in self.hub.state.orgs]
        token = {"displayName": "test", "role": role, "createdAt": "2026-01-01T00:00:00.000Z"}
        return {
            "type": "user",
            "id": OWNER_ID,
            "name": self.hub.user,
            "orgs": orgs,
            "auth": {"type": "access_token", "accessToken": token},
        }

    def _owns(self, namespace: str) -> bool:
        return namespace in (self.hub.user, *self.hub.state.orgs)

    def _create(self, namespace: str, body: str, role: str, after: str | None) -> None:
        if not self._owns(namespace) or role == "read":
            self._answer({"error": "You don't have the required permissions"}, 403)
            return
        try:
            job = self.hub.create(namespace, json.loads(body))
        except jsonschema.ValidationError as error:
            where = ".".join(map(str, error.absolute_path))
            self._answer({"error": f"{where}: {error.message[:200]}"}, 422)
            return
        if after == "stall":
            self.hub.hang()
        if after is not None:
            raise _Dropped
        self._answer_jobs(job.to_json())

    def _list(self, namespace: str, url: Any) -> None:
        query = parse_qs(url.query)
        wanted = dict(label.split("=", 1) for label in query.get("label", []))
        stages = query.get("stage", [])
        jobs = [
            job
            for job in self.hub.jobs
            if job.namespace == namespace
            and wanted.items() <= job.spec.get("labels", {}).items()
            and (not stages or job.stage in stages)
        ]
        start = int(query.get("cursor", ["0"])[0])
        headers = {}
        if len(jobs) > start + PAGE:
            more = [(key, value) for key, values in query.items() for value in values]
            more = [pair for pair in more if pair[0] != "cursor"] + [("cursor", str(start + PAGE))]
            headers["Link"] = f'<{self.hub.endpoint}{url.path}?{urlencode(more)}>; rel="next"'
        self._answer_jobs([job.to_json() for job in jobs[start : start + PAGE]], headers)

    def _job(self, method: str, found: re.Match[str], query: dict[str, list[str]]) -> None:
        job = self.hub.state.jobs.get(found["job"])
        if job is None or job.namespace != found["namespace"]:
            self._answer({"error": "Job not found"}, 404)
        elif found["verb"] == "cancel" and method == "POST":
            if job.stage in TERMINAL:
                self._answer({"error": "Job is not running"}, 400)
                return
            job.cancel()
            self._answer_jobs(job.to_json())
        elif found["verb"] == "logs":
            tail = query.get("tail")
            self._stream(job, int(tail[0]) if tail else None)
        else:
            self._answer_jobs(job.to_json())

    def _stream(self, job: FakeJob, tail: int | None) -> None:
        """Server-sent events; like the hub's, open for as long as the job runs."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        with job.changed:
            sent = 0 if tail is None else max(0, len(job.log) - tail)
        quiet_since = time.monotonic()
        while True:
            with job.changed:
                lines, over = job.log[sent:], job.stage in TERMINAL
                if not lines and not over:
                    job.changed.wait(0.2)
            for timestamp, data in lines:
                event = json.dumps({"timestamp": timestamp, "data": data})
                self.wfile.write(f"data: {event}\n\n".encode())
                quiet_since = time.monotonic()
            sent += len(lines)
            self.wfile.flush()
            drained = not lines and (job.process is None or job.process.poll() is not None)
            if over and drained and time.monotonic() - quiet_since > 0.1:
                return
            if self.hub.state.out:
                raise _Dropped

    def _answer_jobs(self, value: Any, headers: dict[str, str] | None = None) -> None:
        for job in value if isinstance(value, list) else [value]:
            RULES["job"].validate(job)
        self._answer(value, headers=headers)

    def _answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status == 429:
            self.send_header("Retry-After", "1")
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)


def _hardware(name: str) -> dict[str, Any]:
    gpu = {"type": "gpu", "model": "A10G", "quantity": "1", "vram": "24 GB"}
    value = {
        "name": name,
        "prettyName": name,
        "cpu": "2 vCPU",
        "ram": "16 GB",
        "ephemeralStorage": "20 GB",
        "accelerator": None if name.startswith("cpu") else {**gpu, "manufacturer": "Nvidia"},
        "unitCostMicroUSD": 167,
        "unitCostUSD": 0.000167,
        "unitLabel": "minute",
    }
    RULES["hardware"].validate([value])
    return value
