"""A backend whose replicas are files: tests write what becomes of each.

It is a real plug-in: :func:`install` makes a distribution that declares it, so that the library
and the command line find it as they find any other, in this process and in others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import (
    Entrypoint,
    LaunchOptions,
    ReplicaHandle,
    ReplicaResult,
    ReplicaStatus,
)

DIRECTORY_ENV = "SCRIPTED_DIRECTORY"
_NO_OPTIONS = LaunchOptions()


def install(site: Path) -> None:
    """Make ``site`` a directory that declares two backends, once it is on the path."""
    info = site / "scripted-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted\nVersion: 1.0\n")
    entries = (
        "scripted = scripted_executor:ScriptedExecutor\n"
        "elsewhere = scripted_executor:ElsewhereExecutor\n"
    )
    (info / "entry_points.txt").write_text(f"[diloco_cloud.executors]\n{entries}")


class ScriptedExecutor:
    """Replicas that do what files in ``$SCRIPTED_DIRECTORY`` say."""

    backend_name = "scripted"
    supports_inter_replica_network = False

    def __init__(self, *, region: str = "eu") -> None:
        self.directory = Path(os.environ[DIRECTORY_ENV])
        self.region = region

    def fate(self, rank: int | str, attempt: int) -> dict[str, Any]:
        """What becomes of a replica as soon as it is launched."""
        fates = {}
        for name in ("fate", f"fate.{rank}", f"fate.{rank}.{attempt}"):
            path = self.directory / f"{name}.json"
            fates |= json.loads(path.read_text()) if path.exists() else {}
        return fates

    def decide(self, *life: int | str, **values: Any) -> None:
        """Decide the fate of replicas that are not launched yet: of all, a rank, or one life."""
        name = ".".join(["fate", *map(str, life)])
        (self.directory / f"{name}.json").write_text(json.dumps(values))

    @property
    def launched(self) -> list[tuple[int, int]]:
        """All starts of replicas, sorted by rank and attempt."""
        return self.launched_as("")

    def launched_as(self, tag: str) -> list[tuple[int, int]]:
        """The same; of reducers, whose ranks are "R0" and so on elsewhere, with the tag "R"."""
        path = self.directory / f"starts{tag}"
        lines = path.read_text().splitlines() if path.exists() else []
        return sorted((int(rank), int(attempt)) for rank, attempt in map(str.split, lines))

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: int = 3600,
        options: LaunchOptions = _NO_OPTIONS,
    ) -> list[ReplicaHandle]:
        request = {
            "entrypoint": entrypoint,
            "entrypoint_args": dict(entrypoint_args),
            "gpu": gpu,
            "timeout": timeout,
            "attempt": options.attempt,
            "world_size": options.world_size,
            **({"env": dict(options.env)} if options.env else {}),
            "secrets": list(options.secrets),
            "region": self.region,
        }
        handles = []
        tag = _tag(options.name)
        for rank in options.ranks if options.ranks is not None else range(n_replicas):
            name: int | str = f"{tag}{rank}" if tag else rank
            if (self.directory / f"refuse.{name}").exists():
                raise RuntimeError("out of capacity")
            handle = ReplicaHandle(
                rank, self.backend_name, {"file": f"{name}.{options.attempt}.json"}
            )
            fate = {"state": "running", **self.fate(name, options.attempt), "request": request}
            with (self.directory / f"starts{tag}").open("a") as starts:
                starts.write(f"{rank} {options.attempt}\n")
            self.set(name, options.attempt, **fate)
            handles.append(handle)
            if options.on_launched is not None:
                options.on_launched(handle)
        return handles

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        values = self.get(handle)
        return ReplicaStatus(
            values["state"],
            exit_code=values.get("exit_code"),
            reason=values.get("reason"),
            message=values.get("message", ""),
        )

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        return "\n".join(self.get(handle).get("output", "").splitlines()[-n_lines:])

    def cancel(self, handle: ReplicaHandle) -> None:
        values = self.get(handle)
        if values["state"] in ("running", "pending"):
            values |= {"state": "cancelled", "reason": "cancelled"}
        values["cancel_calls"] = values.get("cancel_calls", 0) + 1
        (self.directory / handle.metadata["file"]).write_text(json.dumps(values))

    def preview_launch(
        self, n_replicas: int, *_: object, options: LaunchOptions = _NO_OPTIONS, **__: object
    ) -> list[dict[str, Any]]:
        if self.region == "moon":
            raise ConfigError("there is no region moon", fix="Stay on earth.")
        return [{"replicas": n_replicas, "region": self.region, "secrets": list(options.secrets)}]

    def recover(self, name: str) -> list[ReplicaHandle]:
        tag = _tag(name)
        files = {life: f"{tag}{life[0]}.{life[1]}.json" for life in self.launched_as(tag)}
        return [
            ReplicaHandle(r, self.backend_name, {"file": file}) for (r, _), file in files.items()
        ]

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None
    ) -> list[ReplicaResult]:
        return [ReplicaResult(rank=h.rank, status=self.poll(h)) for h in handles]

    def get(self, handle: ReplicaHandle) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.directory / handle.metadata["file"]).read_text())
        return values

    def set(self, rank: int | str, attempt: int = 0, **values: Any) -> None:
        """Decide what becomes of a replica."""
        path = self.directory / f"{rank}.{attempt}.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**before, **values}))


class ElsewhereExecutor(ScriptedExecutor):
    """The same, apart from the other: its files are in a directory of their own."""

    backend_name = "elsewhere"

    def __init__(self, *, region: str = "asia") -> None:
        super().__init__(region=region)
        self.directory = self.directory.with_name("elsewhere")
        self.directory.mkdir(exist_ok=True)


def _tag(name: str) -> str:
    """Tells a run's reducers from its replicas, by the name they are launched under."""
    return "R" if name.endswith("-R") else ""
