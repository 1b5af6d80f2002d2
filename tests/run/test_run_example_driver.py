"""The example that a user copies does what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from diloco_cloud.run import list_runs

DRIVER = Path(__file__).parents[2] / "examples" / "driver.py"


def test_driver_trains_and_reports(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(DRIVER), "--sync-every", "3", "--rounds", "2"],
        cwd=tmp_path,
        env={**os.environ, "DILOCO_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    for run in list_runs(tmp_path / "runs"):  # whatever happened, nothing stays behind
        run.cancel()
        run.wait(timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all replicas hold the same parameters: True" in done.stdout
    assert "round 1: loss" in done.stdout
