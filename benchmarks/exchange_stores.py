"""Where replicas meet in a measurement: a directory, an S3 server, or one behind slow links."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from shaped_links import shaped_links

from diloco_cloud.store import open_store

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from servers import S3Server, seaweedfs  # tests are not installed

#: In memory, so that no disk is measured.
MEMORY = Path("/dev/shm")
ROUND_TRIP_S = 0.030


@dataclass(frozen=True)
class Place:
    """A store as replicas reach it.

    Attributes:
        name: in tables.
        uri: prefixes are made below it.
        environments: of each replica.
        server: of an S3 store.
        links_pid: of the process that carries the lines.
        mbit_s: of each line, each way; None for none.
    """

    name: str
    uri: str
    environments: tuple[Mapping[str, str], ...]
    server: S3Server | None = None
    links_pid: int | None = None
    mbit_s: float | None = None

    @property
    def near(self) -> Mapping[str, str]:
        """Environment of a process that is next to the store."""
        return {} if self.server is None else self.server.env

    @property
    def server_pid(self) -> int | None:
        return None if self.server is None else self.server.pid

    def clear(self, path: str) -> int:
        """Delete what lies below a path; its bytes."""
        store = open_store(self.uri)
        infos = store.list(f"{path}/")
        store.delete_many([info.key for info in infos])
        return sum(info.size for info in infos)

    def reclaim(self) -> None:
        """Give the memory of deleted objects back, which a server would do at its leisure."""
        if self.server is None:
            return
        vacuum = f"{self.server.master}/vol/vacuum?garbageThreshold=0.3"
        with urllib.request.urlopen(vacuum, timeout=60) as reply:
            reply.read()


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server whose volumes lie in memory; this process's environment leads to it."""
    with seaweedfs(volumes=4, directory=MEMORY) as server:
        os.environ.update(server.env)
        yield server


@contextlib.contextmanager
def directory(replicas: int) -> Iterator[Place]:
    """A directory in memory."""
    with tempfile.TemporaryDirectory(prefix="exchange-", dir=MEMORY) as name:
        yield Place("directory", f"file://{name}", ({},) * replicas)


@contextlib.contextmanager
def s3(server: S3Server, replicas: int, mbit_s: float | None) -> Iterator[Place]:
    """A server, with a line to it for each replica where a rate is given."""
    uri = f"s3://{server.bucket}"
    if mbit_s is None:
        yield Place("S3", uri, (server.env,) * replicas, server)
        return
    address = urlsplit(server.endpoint)
    assert address.hostname is not None
    assert address.port is not None
    with shaped_links(
        (address.hostname, address.port),
        count=replicas,
        mbit_s=mbit_s,
        round_trip_s=ROUND_TRIP_S,
    ) as links:
        environments = tuple(
            {**server.env, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"} for port in links.ports
        )
        name = f"S3, {mbit_s:g} Mbit/s, {1e3 * ROUND_TRIP_S:.0f} ms"
        yield Place(name, uri, environments, server, links.pid, mbit_s)


def place_of(
    store: str, replicas: int, server: S3Server | None
) -> contextlib.AbstractContextManager[Place]:
    """The place that a word names: "directory", "s3", or the Mbit/s of each line to the server."""
    if store == "directory":
        return directory(replicas)
    assert server is not None
    return s3(server, replicas, None if store == "s3" else float(store))
