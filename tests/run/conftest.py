"""Fixtures of the run tests."""

from __future__ import annotations

from run_fixtures import clock, make_clocked, make_run, scripted, store_uri, trainer

__all__ = ["clock", "make_clocked", "make_run", "scripted", "store_uri", "trainer"]
