"""The launcher's end of a zygote (:mod:`diloco_cloud.chaos.zygote`)."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from diloco_cloud.errors import LaunchError

#: For a process that is to be forked, and for its children, which share the machine.
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
#: Seconds that the zygote may take for its imports, and for a fork.
_START_S: Final = 120.0
_FORK_S: Final = 30.0


class WarmPool:
    """The launcher's end of a zygote."""

    def __init__(self, state_dir: Path, modules: Sequence[str], grace: float) -> None:
        descriptor, self.lock = tempfile.mkstemp(".lock", "zygote-", state_dir)
        os.close(descriptor)
        self._pipe, theirs = multiprocessing.Pipe()
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        self._log = state_dir / "zygote.log"
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "diloco_cloud.chaos.zygote"),
                    *(str(theirs.fileno()), self.lock, f"{grace:g}"),
                    *modules,
                ],
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the launcher
            )
        try:
            self.pid: int = self._answer(_START_S)["pid"]
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(self, order: Mapping[str, Any]) -> int:
        """Fork a replica; its pid.

        Raises:
            LaunchError: it did not start.
        """
        try:
            self._pipe.send_bytes(json.dumps(order).encode())
        except OSError as error:
            raise LaunchError(f"the warm process has ended: {error}") from error
        pid: int = self._answer(_FORK_S)["pid"]
        return pid

    def close(self) -> None:
        """End the zygote and its children."""
        self._pipe.close()
        self._process.kill()
        self._process.wait()

    def _answer(self, timeout: float) -> dict[str, Any]:
        try:
            if not self._pipe.poll(timeout):
                self.close()  # what it says later would be taken for the answer to something else
                raise LaunchError(f"the warm process said nothing for {timeout:.0f} s")
            answer: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            lines = self._log.read_text(errors="replace").splitlines()
            why = lines[-1] if lines else "without a word"
            raise LaunchError(
                f"the warm process has ended: {why}", fix=f"Its log is {self._log}."
            ) from error
        if "error" in answer:
            raise LaunchError(f"a replica did not start: {answer['error']}")
        return answer
