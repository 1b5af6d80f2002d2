"""Runs a model's program in a process of its own, with limits.

It keeps accidents from mattering: endless loops, all memory, full disks, forks, stray files, an
opened connection. It is no wall against a program that is out to break it: whoever trains on code
of models they do not trust runs the replica in a container of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["passed", "failed", "timed out"]

#: Put before the program: its limits are set by the process itself, before it reads a line of it.
_GUARD = """\
import resource, sys
def limit(what, value):
    try:
        resource.setrlimit(what, (value, value))
    except (ValueError, OSError):
        pass
limit(resource.RLIMIT_CPU, {cpu})
limit(resource.RLIMIT_AS, {memory})
limit(resource.RLIMIT_FSIZE, {written})
limit(resource.RLIMIT_NOFILE, 16)
limit(resource.RLIMIT_CORE, 0)
FORBIDDEN = ("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.system",
             "os.kill", "os.spawn", "pty.", "ctypes.", "shutil.rmtree", "os.remove", "os.rename")
def refuse(event, args):
    if event.startswith(FORBIDDEN):
        raise PermissionError(event + " is not allowed here")
program = sys.stdin.read()
sys.addaudithook(refuse)
try:
    exec(compile(program, "<completion>", "exec"), {{"__name__": "__main__"}})
except SystemExit:
    # A program that ends itself has not come to its tests.
    raise SystemExit(1)
print({token!r})
"""


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Limits of one program.

    Attributes:
        seconds: of wall-clock time, and of CPU time, rounded up.
        memory_bytes: of address space.
        written_bytes: of any file it writes, its output included.
    """

    seconds: float = 3.0
    memory_bytes: int = 2**30
    written_bytes: int = 2**20

    def run(self, program: str) -> Verdict:
        """Run Python source; "passed" where it came to its end without an exception.

        The program has no environment, no input, a folder of its own that is deleted, and its
        whole process group is killed when it ends or when time is up.
        """
        token = os.urandom(16).hex()
        guard = _GUARD.format(
            cpu=int(self.seconds) + 1,
            memory=self.memory_bytes,
            written=self.written_bytes,
            token=token,
        )
        with tempfile.TemporaryDirectory(prefix="diloco-sandbox-") as folder:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", guard],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            try:
                output, _ = process.communicate(program.encode(), timeout=self.seconds)
            except subprocess.TimeoutExpired:
                return "timed out"
            finally:
                _kill_group(process)
        # The last line alone: the program may print, and cannot know the token beforehand.
        lines = output.decode(errors="replace").splitlines()
        passed = process.returncode == 0 and bool(lines) and lines[-1] == token
        return "passed" if passed else "failed"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
