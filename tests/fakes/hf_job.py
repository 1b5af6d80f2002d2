"""A job of the fake hub: a process in a clean environment, and what the hub tells of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TERMINAL = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
OWNER_ID = "5e9ecfc04957053f60648a3e"


def now() -> str:
    """The time as the hub writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


class FakeJob:
    """One job, from SCHEDULING to its end.

    Args:
        job_id: 24 hexadecimal digits.
        namespace: whose it is.
        spec: the body of the request that made it.
        grace_s: between SIGTERM and SIGKILL.
    """

    def __init__(self, job_id: str, namespace: str, spec: dict[str, Any], grace_s: float) -> None:
        self.id = job_id
        self.namespace = namespace
        self.spec = spec
        self.stage = "SCHEDULING"
        self.message: str | None = None
        self.created_at = now()
        self.started_at: str | None = None
        self.finished_at: str | None = None
        self.failures = 0
        self.log: list[tuple[str, str]] = []
        self.changed = threading.Condition()
        self._grace_s = grace_s
        self._began: float | None = None
        self._ended: float | None = None
        self._process: subprocess.Popen[str] | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="hf-job-"))
        self._thread = threading.Thread(target=self._run, name=f"job-{job_id}", daemon=True)
        self._placed = threading.Event()

    # -- what the hub does with it --------------------------------------------------------------

    def place(self) -> None:
        """Give it a machine."""
        self._placed.set()
        if not self._thread.is_alive() and self.stage == "SCHEDULING":
            self._thread.start()

    def cancel(self, message: str | None = None) -> None:
        """End it, as a user or the hub wishes."""
        with self.changed:
            if self.stage in TERMINAL:
                return
            self._end("CANCELED", message)
        self._stop()

    def fail(self, message: str) -> None:
        """End it without its having run, or because its machine is gone."""
        with self.changed:
            if self.stage in TERMINAL:
                return
            self._end("ERROR", message)
        self._stop()

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Kill its process, as a machine that runs out of memory does."""
        self._signal(signum)

    def close(self) -> None:
        """Leave no process and no file behind."""
        self._signal(signal.SIGKILL)
        if self._thread.is_alive():
            self._thread.join(10)
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def process(self) -> subprocess.Popen[str] | None:
        return self._process

    # -- its life -------------------------------------------------------------------------------

    def _run(self) -> None:
        for _ in range(self.spec.get("attempts", 1)):
            code, timed_out = self._run_once()
            with self.changed:
                if self.stage in TERMINAL:
                    return
                if timed_out:
                    self._end("ERROR", "Job timeout")
                    return
                if code == 0:
                    self._end("COMPLETED", None)
                    return
                self.failures += 1
        # As a container's: 128 and the signal.
        shown = code if code >= 0 else 128 - code
        with self.changed:
            why = "OOMKilled" if code == -signal.SIGKILL else "Error"
            self._end("ERROR", f"Job failed with exit code: {shown}. Reason: {why}")

    def _run_once(self) -> tuple[int, bool]:
        with self.changed:
            if self.stage in TERMINAL:
                return 0, False
            self._process = subprocess.Popen(
                [*self.spec["command"], *self.spec.get("arguments", [])],
                env=self._environment(),
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self.stage, self.started_at = "RUNNING", now()
            self._began = time.monotonic()
            self.log.append((now(), f"===== Job started at {now()} ====="))
            self.changed.notify_all()
        process, timed_out = self._process, threading.Event()
        limit = self.spec.get("timeoutSeconds") or 1800

        def expire() -> None:
            timed_out.set()
            self._stop()

        timer = threading.Timer(limit, expire)
        timer.daemon = True
        timer.start()
        try:
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    with self.changed:
                        self.log.append((now(), line.rstrip("\n")))
                        self.changed.notify_all()
            return process.wait(), timed_out.is_set()
        finally:
            timer.cancel()

    def _environment(self) -> dict[str, str]:
        """Nothing of ours but the way to this interpreter."""
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(self._directory),
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            "JOB_ID": self.id,
            "ACCELERATOR": "",
            "CPU_CORES": "1",
            "MEMORY": "16Gi",
            **self.spec.get("environment", {}),
            **self.spec.get("secrets", {}),
        }

    def _end(self, stage: str, message: str | None) -> None:
        self.stage, self.message, self.finished_at = stage, message, now()
        self._ended = time.monotonic()
        self.changed.notify_all()

    def _stop(self) -> None:
        """SIGTERM now, and SIGKILL after the grace."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        timer = threading.Timer(self._grace_s, self._signal, (signal.SIGKILL,))
        timer.daemon = True
        timer.start()

    def _signal(self, signum: int) -> None:
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)

    # -- what the hub tells ---------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """As the hub answers; of secrets it tells only the names."""
        spec = self.spec
        copied = ("dockerImage", "spaceId", "command", "arguments", "flavor", "labels")
        status: dict[str, Any] = {"stage": self.stage, "message": self.message}
        if self.failures:
            status["failureCount"] = self.failures
        return {
            "id": self.id,
            "type": "job",
            "createdAt": self.created_at,
            **({"startedAt": self.started_at} if self.started_at else {}),
            **({"finishedAt": self.finished_at} if self.finished_at else {}),
            "createdBy": {"id": OWNER_ID, "name": self.namespace},
            "owner": {
                "id": OWNER_ID,
                "name": self.namespace,
                "type": "user",
                "avatarUrl": "/avatars/0.svg",
            },
            "environment": spec.get("environment", {}),
            "secrets": sorted(spec.get("secrets", {})),
            **{key: spec[key] for key in copied if key in spec},
            **({"timeout": spec["timeoutSeconds"]} if spec.get("timeoutSeconds") else {}),
            "retry": spec.get("attempts", 1) - 1,
            "durations": self._durations(),
            "status": status,
        }

    def _durations(self) -> dict[str, int]:
        if self._began is None:
            return {}
        ended = self._ended if self._ended is not None else time.monotonic()
        return {"schedulingSecs": 0, "runningSecs": int(ended - self._began)}
