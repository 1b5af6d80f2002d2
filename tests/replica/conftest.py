"""Replicas in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from replica_process import ReplicaProcess, Start


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a replica; whatever is left of it is killed in the end."""
    started: list[ReplicaProcess] = []

    def run(function: str, **settings: Any) -> ReplicaProcess:
        started.append(ReplicaProcess(tmp_path, function, **settings))
        return started[-1]

    yield run
    for replica in started:
        replica.close()
