"""A short soak, by the program that does the long one: real processes, bad weather, kills."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parents[2] / "benchmarks/soak.py"


def test_nothing_drifts_or_grows_in_bad_weather(tmp_path: Path) -> None:
    """The program itself checks digests, decisions and the ledger, and fails if one is wrong."""
    command = [sys.executable, str(SOAK), "--rounds", "150", "--kill-every", "25"]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "soak.json").read_text())
    assert figures["rounds"] >= 150
    assert figures["kills"] >= 2
    assert all(figures["faults"].values())
    assert figures["parameters_compared"] > 3 * 150
    assert figures["tokens"]["died"] < 0.05 * figures["tokens"]["processed"]
    # Two snapshots and the rounds since the older one; what each life leaves for good is apart.
    assert all(one["objects"] < 200 for one in figures["samples"])
    asked = figures["requests_per_replica_and_round"]
    assert asked["last"] < 1.5 * asked["first"]
