"""A real Ray head on this machine, where ray is installed; nothing of it is imported."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from servers import free_ports

START_TIMEOUT_S = 120.0


def ray_binary() -> str | None:
    """The ``ray`` command beside this interpreter, or on PATH."""
    beside = Path(sys.executable).with_name("ray")
    return str(beside) if beside.exists() else shutil.which("ray")


@contextlib.contextmanager
def ray_head(root: Path) -> Iterator[str]:
    """Run a head with eight CPUs until the block ends; yields the dashboard's address."""
    binary = ray_binary()
    assert binary is not None
    gcs, dashboard, agent, agent_grpc, metrics, client, runtime_env = free_ports(7)
    address = f"http://127.0.0.1:{dashboard}"
    command = [
        *(binary, "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=8"),
        *("--node-ip-address=127.0.0.1", "--include-dashboard=true"),
        *(f"--port={gcs}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
        *(f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}"),
        *(f"--metrics-export-port={metrics}", f"--ray-client-server-port={client}"),
        *(f"--runtime-env-agent-port={runtime_env}", "--object-store-memory=80000000"),
        # Paths of sockets have to be short.
        f"--temp-dir={root}",
    ]
    with (root / "head.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        _await(address, process, root / "head.log")
        yield address
    finally:
        process.send_signal(signal.SIGTERM)  # by which --block ends what it has started
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)


def _await(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the dashboard answers, and an agent can take jobs."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise OSError(f"the Ray head ended at its start:\n{log.read_text()[-2000:]}")
        with (
            contextlib.suppress(OSError, ValueError),
            urllib.request.urlopen(f"{address}/api/version", timeout=5) as response,
        ):
            json.loads(response.read())
            return
        time.sleep(0.2)
    raise TimeoutError(f"no answer from the Ray head:\n{log.read_text()[-2000:]}")
