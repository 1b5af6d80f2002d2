"""Processes to run replicas in."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPoolExecutor]:
    """Four processes that import torch and the like once for all tests here."""
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        yield pool
