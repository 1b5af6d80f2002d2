"""Runs a model's program in a process of its own, with limits.

It keeps accidents from mattering: endless loops, all memory, full disks, forks, stray files, an
opened connection. It is no wall against a program that is out to break it, which can undo what is
refused inside its own interpreter, mend its own tests, and, where it gets that far, read what the
replica's user can read: the replica's environment, with its credentials, in ``/proc`` among it.
Whoever trains on code of models they do not trust runs the replica in a container of its own, with
no credentials but for the run's store.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from diloco_cloud.composer import rewards_sandbox_guard as guard
from diloco_cloud.errors import RewardError

Verdict: TypeAlias = Literal["passed", "failed", "timed out"]

_VERDICTS: Final[dict[int, Verdict]] = {
    guard.PASSED: "passed",
    guard.FAILED: "failed",
    guard.TIMED_OUT: "timed out",
}
#: Seconds beside the program's own: an interpreter starts slowly on a busy machine.
_START_S: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Limits of one program.

    Attributes:
        seconds: of wall-clock time, and of CPU time, rounded up.
        memory_bytes: of address space.
        written_bytes: of any file it writes. What it prints goes nowhere.
    """

    seconds: float = 3.0
    memory_bytes: int = 2**30
    written_bytes: int = 2**20

    def run(self, program: str) -> Verdict:
        """Run Python source; "passed" where it came to its end without an exception.

        The program has no environment, no input, no threads, and a folder of its own that is
        deleted, outside of which it opens no file to write. A second process, in which no line of
        it runs, says how it ended, and kills what it leaves behind (on Linux whatever its session
        is; elsewhere its process group).

        Raises:
            RewardError: the sandbox itself does not run.
        """
        limits = (str(self.seconds), str(self.memory_bytes), str(self.written_bytes))
        with tempfile.TemporaryDirectory(prefix="diloco-sandbox-") as folder:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(Path(guard.__file__)), *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            try:
                process.communicate(
                    program.encode(errors="replace"), timeout=self.seconds + _START_S
                )
            except subprocess.TimeoutExpired:
                return "timed out"
            finally:
                _kill_group(process)
        if process.returncode in _VERDICTS:
            return _VERDICTS[process.returncode]
        if process.returncode < 0:
            return "failed"
        raise RewardError(
            f"the sandbox did not start (exit status {process.returncode})",
            fix=f"See what `{sys.executable} -I -c ''` says where the replicas run.",
        )


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
