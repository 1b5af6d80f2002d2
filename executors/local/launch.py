"""Starting one replica: its state directory, its environment, its runner."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from diloco_cloud.entrypoints import Function
from diloco_cloud.errors import ConfigError, LaunchError
from diloco_cloud.executor import Script
from diloco_cloud.executors.local import runner
from diloco_cloud.executors.local.state import LocalReplica, launch_prefix
from diloco_cloud.launch_request import LaunchRequest

#: Seconds a runner may take to report; it needs 0.03 on an idle machine.
_REPORT_TIMEOUT: Final = 60.0
#: Executed by path, never imported here.
_CHILD: Final = str(Path(__file__).with_name("child.py"))


@dataclass(frozen=True)
class PreparedLaunch:
    """Everything the replicas of one launch have in common."""

    directory: Path
    request: LaunchRequest
    program: dict[str, Any]
    timeout: float
    grace: float

    def start(self, rank: int, environment: Mapping[str, str]) -> LocalReplica:
        """Start one replica and wait until its process exists.

        Raises:
            OSError, LaunchError: it could not be started, and nothing of it is left.
        """
        directory = self.directory / f"{rank}.{self.request.attempt}"
        directory.mkdir(mode=0o700)
        program = dict(self.program)
        argv = program.pop("argv", None) or [sys.executable, "-P", _CHILD, str(directory)]
        spec = {
            "rank": rank,
            "host": socket.gethostname(),
            "attempt": self.request.attempt,
            "argv": argv,
            "timeout": self.timeout,
            "grace": self.grace,
            **program,
        }
        runner.write_json(str(directory / "spec.json"), spec)
        report = spawn_runner("run", directory, environment)
        return LocalReplica.started(directory, spec, report)


def prepare(
    request: LaunchRequest, *, name: str, state_dir: Path, timeout: float, grace: float
) -> PreparedLaunch:
    """Write down what all replicas of a launch share.

    Raises:
        ConfigError: a callable, or an argument of one, that another process cannot be given.
        LaunchError: the state directory cannot be written.
    """
    if _is_importing_main():
        raise ConfigError(
            "a replica tried to launch replicas while importing the launching script",
            fix='Launch under `if __name__ == "__main__":`, as with multiprocessing.',
        )
    target = request.target
    payload = None if isinstance(target, (Function, Script)) else _pickle(target, request.arguments)
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory = Path(tempfile.mkdtemp(prefix=launch_prefix(name), dir=state_dir))
        if payload is not None:
            (directory / "callable.pickle").write_bytes(payload)
    except OSError as error:
        raise LaunchError(
            f"the state directory {state_dir} cannot be written: {error}",
            fix="Set DILOCO_HOME to a directory of yours.",
        ) from error
    return PreparedLaunch(directory, request, _program(request, directory), timeout, grace)


def _program(request: LaunchRequest, directory: Path) -> dict[str, Any]:
    """The part of ``spec.json`` that says what to call."""
    target = request.target
    if isinstance(target, Script):
        return {"argv": [sys.executable, os.path.abspath(target.path), *target.args]}
    sys_path = [os.path.abspath(entry) for entry in sys.path]  # "" is the working directory
    if isinstance(target, Function):
        call = {"module": target.module, "function": target.name, "arguments": request.arguments}
        return {"sys_path": sys_path, **call}
    return {
        "sys_path": sys_path,
        "callable": str(directory / "callable.pickle"),
        "preparation": _preparation(sys_path),
    }


def _preparation(sys_path: list[str]) -> dict[str, Any]:
    """What ``multiprocessing.spawn.prepare`` needs to make the launcher's ``__main__`` importable.

    ``multiprocessing.spawn.get_preparation_data`` is not called: it fixes the launcher's start
    method for good, and would put its authentication key in a file.
    """
    data = {"name": "replica", "sys_path": sys_path, "sys_argv": sys.argv, "dir": os.getcwd()}
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    path = getattr(main, "__file__", None)
    if spec is not None:
        data["init_main_from_name"] = spec.name
    elif path is not None:
        data["init_main_from_path"] = os.path.abspath(path)
    return data


def _is_importing_main() -> bool:
    """Whether this is a replica on its way to a callable of the launcher's ``__main__``."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and getattr(process.current_process(), "_inheriting", False)


def _pickle(target: Any, arguments: Mapping[str, Any]) -> bytes:
    main = sys.modules["__main__"]
    if getattr(target, "__module__", None) == "__main__" and not hasattr(main, "__file__"):
        raise ConfigError(
            f"replicas cannot import {target!r}, which was typed in, not read from a file",
            fix="Put it in a Python file and import it from there.",
        )
    try:
        return pickle.dumps((target, dict(arguments)))
    except Exception as error:  # pickle raises whatever the object's own methods raise
        raise ConfigError(
            f"the entrypoint or an argument cannot be sent to another process: {error}",
            fix="Use a function defined at the top level of a module, and picklable arguments.",
        ) from None


def spawn_runner(
    action: str, directory: Path, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Start a detached runner on a replica's directory; return what it reports.

    Raises:
        OSError: no process could be started.
        LaunchError: the runner could not start the replica, or died.
    """
    argv = [sys.executable, "-I", "-S", runner.__file__, action, str(directory)]
    with (directory / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdout is not None
    with process.stdout:
        text = _read_report(process.stdout.fileno())
    if text is None:
        # Closing our end made it end its replica, once it gets to run; this ends what hangs.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()  # it forks at once and the parent exits; the rest is nobody's child
    report: dict[str, Any] = json.loads(text) if text else {"error": "its runner did not report"}
    if "error" in report:
        raise LaunchError(f"a replica did not start: {report['error']}")
    return report


def _read_report(descriptor: int) -> bytes | None:
    """Read until the other end lets go; None if it takes too long."""
    blocks: list[bytes] = []
    while select.select([descriptor], [], [], _REPORT_TIMEOUT)[0]:
        block = os.read(descriptor, 65_536)
        if not block:
            return b"".join(blocks)
        blocks.append(block)
    return None
