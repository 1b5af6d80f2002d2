"""Callables of a launching script, under the rules of multiprocessing's "spawn"."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

DEFINITIONS = """
import json, multiprocessing, os, sys
from diloco_cloud.executors.local import LocalProcessExecutor

class Point:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return self.x == other.x

def double(point):
    return Point(2 * point.x), __name__, sys.argv[1:]

def launch():
    executor = LocalProcessExecutor(state_dir=os.environ["STATE"])
    handles = executor.launch_replicas(2, double, {"point": Point(21)})
    first, second = executor.collect(handles, timeout=60)
    assert multiprocessing.get_start_method(allow_none=True) is None
    point, name, arguments = first["result"] or (None, None, None)
    equal = point is not None and point == Point(42)
    print(json.dumps([equal, name, arguments, first["status"], first["error"]]))
"""


def run_script(tmp_path: Path, ending: str, *command: str) -> list[object]:
    """Run a launching script, and return what it prints."""
    (tmp_path / "launching.py").write_text(DEFINITIONS + ending)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={"PATH": "", "STATE": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    printed: list[object] = json.loads(done.stdout)
    return printed


def test_function_and_class_of_main_reach_replicas(tmp_path: Path) -> None:
    ending = 'if __name__ == "__main__": launch()'
    seen = run_script(tmp_path, ending, "launching.py", "--flag")
    assert seen == [True, "__mp_main__", ["--flag"], "succeeded", None]


def test_main_may_be_run_as_a_module(tmp_path: Path) -> None:
    ending = 'if __name__ == "__main__": launch()'
    seen = run_script(tmp_path, ending, "-m", "launching")
    assert seen == [True, "__mp_main__", [], "succeeded", None]


def test_script_without_guard_is_told_so(tmp_path: Path) -> None:
    seen = run_script(tmp_path, "launch()", "launching.py")
    assert seen[3] == "failed"
    assert "while importing the launching script" in str(seen[4])
    assert len(list((tmp_path / "state").glob("*"))) == 1


def test_function_that_was_typed_in_is_refused(tmp_path: Path) -> None:
    script = DEFINITIONS + "launch()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PATH": "", "STATE": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "not read from a file" in done.stderr
    assert not (tmp_path / "state").exists()
