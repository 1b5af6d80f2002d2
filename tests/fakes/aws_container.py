"""A training job's container: its command as a real process, in an environment of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


class Container:
    """One process, whose every line of output is told.

    Args:
        command: its words.
        environment: all of it: nothing is inherited.
        directory: stands for the container's disk; ``/opt/ml`` is in it.
        on_line: told each line of stdout and stderr, without its end.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        on_line: Callable[[str], None],
    ) -> None:
        self._on_line = on_line
        ml = directory / "opt" / "ml"
        (ml / "output").mkdir(parents=True, exist_ok=True)

        def mounted(text: str) -> str:
            return text.replace("/opt/ml", str(ml))

        self._process = subprocess.Popen(
            [mounted(word) for word in command],
            cwd=directory,
            env={name: mounted(value) for name, value in environment.items()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def exit_code(self) -> int | None:
        """As a shell tells it; None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def terminate(self) -> None:
        """Send SIGTERM to its first process, as container engines do."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def close(self) -> None:
        """Kill whatever is left of it, and read what it said last."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(timeout=10)
        self._reader.join(timeout=10)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self._on_line(line.decode(errors="replace").rstrip("\r\n"))


def base_environment(directory: Path) -> dict[str, str]:
    """What an image sets; its ``python`` is the one of the tests."""
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(directory),
        "LANG": "C.UTF-8",
        # Replicas share the test machine, and each library would start a thread per core.
        "OMP_NUM_THREADS": "1",
    }


def _die_with_parent() -> None:
    """Let the kernel kill the replica when the tests are killed and clean nothing up."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
