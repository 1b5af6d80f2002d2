"""Sources of the user's own, for a container that does not have them.

They are uploaded when a run's replicas are first started. One that is started again, by whichever
machine, finds what was uploaded then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from diloco_cloud.errors import ConfigError

CHANNEL: Final = "source"
#: Where SageMaker puts the channel's files; it is on the replica's import path.
SOURCE_PATH: Final = f"/opt/ml/input/data/{CHANNEL}"
#: Never part of anybody's sources.
_LEFT_OUT: Final = frozenset(
    {"__pycache__", "node_modules", "venv", "runs", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
)
#: Bytes; more than that is data, which does not belong here.
_MOST: Final = 200 << 20


@dataclass(frozen=True)
class Sources:
    """A folder of sources.

    Attributes:
        directory: of the launching machine.
        files: relative paths, sorted.
    """

    directory: Path
    files: tuple[str, ...]

    @classmethod
    def read(cls, directory: str) -> Sources:
        """Find the files below a directory.

        Hidden files, caches and virtual environments are left out.

        Raises:
            ConfigError: there is no such directory, or there is too much in it.
        """
        root = Path(directory).absolute()
        if not root.is_dir():
            raise ConfigError(
                f"source_dir is {directory!r}, which is no directory",
                fix="Name the folder that the trainer's module is imported from.",
            )
        files = tuple(sorted(_files(root)))
        total = sum((root / name).stat().st_size for name in files)
        if total > _MOST:
            raise ConfigError(
                f"source_dir holds {total >> 20} MiB",
                fix=f"Upload at most {_MOST >> 20} MiB, and keep data in the store.",
            )
        return cls(root, files)

    def upload(self, client: Any, uri: str) -> None:
        """Upload the files, and delete what was there before.

        Args:
            client: of S3.
            uri: "s3://bucket/prefix/".
        """
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        for name in self.files:
            content = (self.directory / name).read_bytes()
            client.put_object(Bucket=bucket, Key=prefix + name, Body=content)
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        there = {item["Key"] for page in pages for item in page.get("Contents", ())}
        for key in there - {prefix + name for name in self.files}:
            client.delete_object(Bucket=bucket, Key=key)


def _files(root: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in _LEFT_OUT
            and not name.startswith(".")
            and not Path(folder, name, "pyvenv.cfg").exists()
        ]
        for name in names:
            if not name.startswith(".") and not name.endswith(".pyc"):
                yield Path(folder, name).relative_to(root).as_posix()
