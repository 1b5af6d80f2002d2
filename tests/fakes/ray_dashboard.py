"""Ray's Jobs API over a real socket, running jobs as processes of this machine.

Bodies, states and error texts are those of ray 2.60, recorded from a real head. Like Ray, it runs
an entrypoint in a shell of its own session, stops it by SIGTERM to each of its processes, and by
SIGKILL after ``RAY_JOB_STOP_WAIT_TIME_S`` of the job's environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Json = dict[str, Any]
_JOB = re.compile(r"/api/jobs/([^/]+)(/logs|/stop)?")
_TERMINAL = ("SUCCEEDED", "FAILED", "STOPPED")
_MESSAGES = {
    "PENDING": "Job has not started yet. It may be waiting for the runtime environment to be set "
    "up.",
    "RUNNING": "Job is currently running.",
    "STOPPED": "Job was intentionally stopped.",
    "SUCCEEDED": "Job finished successfully.",
}
_TRACEBACK = 'Traceback (most recent call last):\n  File "job_head.py", line 419\n'


@dataclass
class Job:
    """One submitted job."""

    body: Json
    log: Path
    status: str = "PENDING"
    message: str = _MESSAGES["PENDING"]
    error_type: str | None = None
    code: int | None = None
    started_at: float = field(default_factory=time.time)
    process: subprocess.Popen[bytes] | None = None
    stop_asked: threading.Event = field(default_factory=threading.Event)

    def to_json(self, submission_id: str) -> Json:
        agent = "http://127.0.0.1:52365" if self.process else None
        return {
            "type": "SUBMISSION",
            "job_id": None,
            "submission_id": submission_id,
            "driver_info": None,
            "status": self.status,
            "entrypoint": self.body["entrypoint"],
            "message": self.message,
            "error_type": self.error_type,
            "start_time": int(self.started_at * 1000),
            "end_time": int(time.time() * 1000) if self.status in _TERMINAL else None,
            "metadata": self.body.get("metadata"),
            "runtime_env": self.body.get("runtime_env"),
            "driver_agent_http_address": agent,
            "driver_node_id": "31d13ecd" if self.process else None,
            "driver_exit_code": self.code,
        }


class FakeDashboard:
    """A Ray head's dashboard.

    Args:
        root: for logs.
        nodes_env: variables that every job has, as the nodes' own.

    Attributes:
        requests: "METHOD path" and body of everything that was asked, in order.
        resources: of all nodes.
        outages: how many requests are still answered by 503.
        agentless: how many submissions still find no agent that could take them.
        lost_replies: how many submissions still act and then break the connection.
        held: jobs wait while it is set.
        autoscales: whether there may be more nodes.
        token: that requests must bring; None for none.
    """

    def __init__(self, root: Path, nodes_env: dict[str, str]) -> None:
        self.requests: list[tuple[str, str]] = []
        self.resources = {"CPU": 8.0, "memory": 1e10}
        self.outages = 0
        self.agentless = 0
        self.lost_replies = 0
        self.held = threading.Event()
        self.autoscales = False
        self.token: str | None = None
        self._root = root
        self._nodes_env = nodes_env
        self._jobs: dict[str, Job] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        dashboard = self

        class Handler(_Handler):
            owner = dashboard

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._serving = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._serving.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self.held.clear()
        for job in self._jobs.values():
            job.stop_asked.set()
            _kill_group(job.process)
        for thread in self._threads:
            thread.join(timeout=30)
        self._server.shutdown()
        self._server.server_close()
        self._serving.join(timeout=10)

    # -- what a test does ----------------------------------------------------------------------

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        self.outages = 1_000_000
        try:
            yield
        finally:
            self.outages = 0

    def lose_node(self, submission_id: str, message: str = "The node is dead.") -> None:
        """Kill a job with its node; its supervisor dies, and says nothing."""
        job = self._jobs[submission_id]
        while job.status == "PENDING":
            time.sleep(0.02)
        self._end(job, "FAILED", f"Job supervisor actor died: {message}")
        job.error_type = "JOB_SUPERVISOR_ACTOR_DIED"
        _kill_group(job.process)

    def give_up(self, submission_id: str) -> None:
        """What Ray does after 15 minutes without the resources that a job asked for."""
        job = self._jobs[submission_id]
        self._end(job, "FAILED", "Job supervisor actor failed to start within 900.0 seconds.")
        job.error_type = "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"
        job.stop_asked.set()

    def bodies(self) -> list[Json]:
        """Of the submissions."""
        return [json.loads(body) for line, body in self.requests if line == "POST /api/jobs/"]

    # -- the API -------------------------------------------------------------------------------

    def answer(self, method: str, path: str, body: str, token: str) -> tuple[int, str]:
        self.requests.append((f"{method} {path}", body))
        if self.outages > 0:
            self.outages -= 1
            return 503, "upstream connect error"
        if self.token is not None and token != f"Bearer {self.token}":
            return 401, "Unauthorized: Missing authentication token"
        if (method, path) == ("POST", "/api/jobs/"):
            return self._submit(json.loads(body))
        if (method, path) == ("GET", "/api/jobs/"):
            return 200, json.dumps([job.to_json(id_) for id_, job in list(self._jobs.items())])
        if (method, path) == ("GET", "/api/cluster_status"):
            return 200, json.dumps(self._cluster_status())
        match = _JOB.fullmatch(path)
        if match is None:
            return 404, "404: Not Found"
        job = self._jobs.get(match[1])
        if job is None:
            return 404, f"Job {match[1]} does not exist"
        if match[2] == "/logs":
            started = job.process is not None
            return 200, json.dumps(
                {"logs": job.log.read_text("utf-8", "replace") if started else ""}
            )
        if match[2] == "/stop":
            job.stop_asked.set()
            return 200, json.dumps({"stopped": job.status not in _TERMINAL})
        if method == "DELETE":
            return self._delete(match[1], job)
        return 200, json.dumps(job.to_json(match[1]))

    def _submit(self, body: Json) -> tuple[int, str]:
        metadata = body.get("metadata") or {}
        if not all(isinstance(value, str) for value in metadata.values()):
            return (
                400,
                f"{_TRACEBACK}TypeError: metadata values must be strings, got <class 'int'>\n",
            )
        if self.agentless > 0:
            self.agentless -= 1
            said = "No available agent to submit job, please try again later."
            return 500, f"{_TRACEBACK}Exception: {said}\n"
        id_ = body["submission_id"]
        with self._lock:
            if id_ in self._jobs:
                return 500, (
                    f"{_TRACEBACK}RuntimeError: Request failed with status code 400: {_TRACEBACK}"
                    f"ValueError: Job with submission_id {id_} already exists. Please use a "
                    "different submission_id.\n.\n"
                )
            job = self._jobs[id_] = Job(body, self._root / f"job-driver-{id_}.log")
        thread = threading.Thread(target=self._run, args=(id_, job))
        self._threads.append(thread)
        thread.start()
        if self.lost_replies > 0:
            self.lost_replies -= 1
            return 0, ""
        return 200, json.dumps({"job_id": id_, "submission_id": id_})

    def _delete(self, id_: str, job: Job) -> tuple[int, str]:
        if job.status not in _TERMINAL:
            return (
                500,
                f"{_TRACEBACK}RuntimeError: Attempted to delete job '{id_}', but it is in a ",
            )
        del self._jobs[id_]
        return 200, json.dumps({"deleted": True})

    def _cluster_status(self) -> Json:
        node = "rayWorkerDefault" if self.autoscales else f"node{'Bf7086Aa' * 7}"
        usage = {name[:1].lower() + name[1:]: [0.0, n] for name, n in self.resources.items()}
        return {
            "result": True,
            "msg": "Got cluster status.",
            "data": {
                "clusterStatus": {
                    "autoscalerReport": {"activeNodes": {node: 1}},
                    "loadMetricsReport": {"usage": usage, "nodeTypes": [[self.resources, 1]]},
                }
            },
        }

    # -- running a job -------------------------------------------------------------------------

    def _run(self, id_: str, job: Job) -> None:
        while self.held.is_set():
            time.sleep(0.02)
        if job.status in _TERMINAL:
            return
        entrypoint = job.body["entrypoint"]
        with job.log.open("ab") as log:
            log.write(b"INFO job_manager.py:581 -- Runtime env is setting up.\n")
            log.write(f"Running entrypoint for job {id_}: {entrypoint}\n".encode())
            log.flush()
            job.process = subprocess.Popen(
                entrypoint,
                shell=True,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._root,
                env=self._environment(id_, job.body),
            )
        job.status, job.message = "RUNNING", _MESSAGES["RUNNING"]
        while job.process.poll() is None and not job.stop_asked.is_set():
            time.sleep(0.02)
        if job.process.returncode is None:
            self._stop(job, job.process)
            self._end(job, "STOPPED", _MESSAGES["STOPPED"])
        else:
            self._ended(job, job.process.returncode)

    def _environment(self, id_: str, body: Json) -> dict[str, str]:
        user = pwd.getpwuid(os.getuid())
        variables = (body.get("runtime_env") or {}).get("env_vars") or {}
        environment = {
            "HOME": user.pw_dir,
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "PYTHONUNBUFFERED": "1",
            "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"metadata": {"job_submission_id": id_}}),
            **self._nodes_env,
        }
        for name, value in variables.items():
            environment[name] = _expanded(value, environment)
        return environment

    def _stop(self, job: Job, process: subprocess.Popen[bytes]) -> None:
        """SIGTERM to each process of the job, SIGKILL after its own time."""
        variables = (job.body.get("runtime_env") or {}).get("env_vars") or {}
        deadline = time.monotonic() + int(variables.get("RAY_JOB_STOP_WAIT_TIME_S", 3))
        for pid in [process.pid, *_descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        _kill_group(process)
        process.wait()

    def _ended(self, job: Job, code: int) -> None:
        _kill_group(job.process)
        if job.status in _TERMINAL:  # with its node
            return
        job.code = code
        if code == 0:
            self._end(job, "SUCCEEDED", _MESSAGES["SUCCEEDED"])
            return
        job.error_type = "JOB_ENTRYPOINT_COMMAND_ERROR"
        lines = job.log.read_text("utf-8", "replace").splitlines(keepends=True)
        tail = "".join(lines[-10:])[-20_000:]
        self._end(
            job,
            "FAILED",
            f"Job entrypoint command failed with exit code {code}, last available logs (truncated "
            f"to 20,000 chars):\n{tail}",
        )

    def _end(self, job: Job, status: str, message: str) -> None:
        with self._lock:
            if job.status not in _TERMINAL:
                job.message, job.status = message, status


class _Handler(BaseHTTPRequestHandler):
    """Hands requests to the dashboard that owns it."""

    owner: FakeDashboard

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length).decode()
        token = self.headers.get("Authorization", "")
        status, text = self.owner.answer(self.command, self.path, body, token)
        if status == 0:
            self.close_connection = True  # the reply is lost
            return
        raw = text.encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    do_GET = do_POST = do_DELETE = _serve

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _expanded(value: str, environment: dict[str, str]) -> str:
    """A variable as Ray sets it: ``update_envs`` of ray/_private/utils.py."""

    def other(match: re.Match[str]) -> str:
        return environment.get(match[1].strip("{}"), match[0])

    found = re.sub(r"\$(\w+|\{[^}]*\})", other, value)
    return re.sub(r"\$\{[A-Z0-9_]+\}", "", found)


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = path.read_text("utf-8", "replace").rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def _kill_group(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
