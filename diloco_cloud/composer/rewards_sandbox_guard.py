"""The script that a sandbox runs: it watches one process, in which the program is.

    python -I -B rewards_sandbox_guard.py SECONDS MEMORY_BYTES WRITTEN_BYTES < program

Only its exit status says how the program ended, and no line of the program runs in the process that
has that status. It imports the standard library alone: isolated mode finds no more.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import signal
import sys
import types
from collections.abc import Callable
from typing import Any, Final, NoReturn

PASSED: Final = 10
FAILED: Final = 11
TIMED_OUT: Final = 12

_PR_SET_CHILD_SUBREAPER: Final = 36


def main() -> int:
    """Run the program on standard input; the exit status is the verdict."""
    seconds, memory, written = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    program = sys.stdin.buffer.read()
    _adopt_orphans()
    reader, writer = os.pipe()
    # What the program's process says when it comes to its end. It is in nothing that the program
    # is given: no argument, no variable, no frame, no file.
    token = os.urandom(16)
    child = os.fork()
    if child == 0:
        os.close(reader)
        atexit.register(os.write, writer, token)
        del token
        _run(program, int(seconds) + 1, memory, written)
        return 0
    os.close(writer)
    status = _wait(child, seconds)
    _kill_descendants()
    if status is None:
        return TIMED_OUT
    os.set_blocking(reader, False)
    try:
        said = os.read(reader, 2 * len(token))
    except BlockingIOError:
        said = b""
    return PASSED if status == 0 and said == token else FAILED


def _run(program: bytes, cpu: int, memory: int, written: int) -> None:
    """Run the program here; return only if it comes to its end."""
    leave = os._exit
    for limit, value in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, written),
        (resource.RLIMIT_NOFILE, 16),
        (resource.RLIMIT_CORE, 0),
        # Counts the user's processes and threads, but stops those of this process alone. It does
        # not bind root.
        (resource.RLIMIT_NPROC, 0),
    ):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, value))
    own = _hide_guard()
    sys.addaudithook(_refusal(os.path.realpath(os.getcwd())))
    try:
        exec(compile(program, "<completion>", "exec"), own)
    except BaseException:
        # A program that ends itself has not come to its tests.
        leave(1)


def _hide_guard() -> dict[str, Any]:
    """The program's namespace, in a process that offers it no easy way to another one.

    Returns:
        The namespace of a new ``__main__``; this script's is in ``sys.modules`` no longer.
    """
    # What has no audit event of its own, in all Pythons.
    import _posixsubprocess
    import _thread

    for module, names in (
        (_posixsubprocess, ("fork_exec",)),
        (_thread, ("start_new_thread", "start_new", "start_joinable_thread")),
        (atexit, ("_run_exitfuncs",)),
    ):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, _refused)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("ctypes", "_ctypes")]:
        del sys.modules[name]
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    return vars(program)


def _refused(*args: Any, **kwargs: Any) -> NoReturn:
    raise PermissionError("not allowed here")


def _refusal(folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook; all it reads is in its closure, where the program has no name for it."""
    events = (
        *("socket.", "subprocess.", "pty.", "ctypes.", "gc.get_"),
        *("os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "os.kill"),
        *("os.remove", "os.rename", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown"),
        *("shutil.rmtree", "signal.pthread_kill"),
    )
    modules = frozenset({"_posixsubprocess", "_multiprocessing", "_ctypes", "ctypes"})
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    realpath, fsdecode = os.path.realpath, os.fsdecode
    beneath = folder + os.sep

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(events):
            raise PermissionError(f"{event} is not allowed here")
        if event == "import" and args[0] in modules:
            # numpy and others do without them.
            raise ImportError(f"{args[0]} is not allowed here")
        if event == "open" and isinstance(args[0], str | bytes):
            path = realpath(fsdecode(args[0]))
            if path.startswith("/proc/"):
                raise PermissionError(f"{path} is not to be read here")
            if args[2] & writing and not path.startswith(beneath) and path != os.devnull:
                raise PermissionError(f"{path} is not to be written here")

    return refuse


def _wait(child: int, seconds: float) -> int | None:
    """The status that ``child`` ends with; None if it has not when time is up."""

    def give_up(signum: int, frame: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return os.waitpid(child, 0)[1]
    except TimeoutError:
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _adopt_orphans() -> None:
    """Become the parent of what a dead descendant leaves behind, whatever its session."""
    if sys.platform == "linux":
        with contextlib.suppress(ImportError, OSError, AttributeError):
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_descendants() -> None:
    """Kill the children, then the orphans that come from them, until there are none."""
    while found := _children():
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    own = os.getpid()
    found: list[int] = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        with contextlib.suppress(ValueError, OSError, IndexError):
            with open(f"/proc/{int(name)}/stat", encoding="utf-8", errors="replace") as file:
                # The command is in parentheses, and may have any character in it.
                parent = int(file.read().rpartition(")")[2].split()[1])
            if parent == own:
                found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(main())
