"""Running Slurm's commands: on this machine, or on a login node over ssh.

Everything this backend does is a command, files on the cluster's disk included, so that one way to
run commands is all that it needs.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

#: Seconds a command may take; Slurm's own give up on a controller that is down after ten.
TIMEOUT_S: Final = 60.0
#: What a user sets to have them print something else, or ask; none of it is meant for us.
_FOREIGN_SETTINGS: Final = ("SQUEUE_", "SCANCEL_", "SINFO_", "SCONTROL_")
#: By which ssh says that it is to blame, and not the command.
_SSH_FAILED: Final = 255


class CommandError(Exception):
    """A command could not be run, or did not come back: nothing is known of what it did."""


class NoCommandError(CommandError):
    """There is no such command here: certainly nothing was done."""


@dataclass(frozen=True)
class Output:
    """What a command that came back has left.

    Attributes:
        code: its exit code.
        out, err: what it printed.
    """

    code: int
    out: str = ""
    err: str = ""

    @property
    def complaint(self) -> str:
        """The last line it printed in anger, without the command's name."""
        lines = [
            line for line in self.err.splitlines() if line.strip() and not line.startswith("Try ")
        ]
        last = lines[-1] if lines else f"it ended with code {self.code}"
        for name in ("sbatch: error: ", "sbatch: ", "squeue: error: ", "scancel: error: "):
            last = last.removeprefix(name)
        return last.strip()


#: Runs a command with a text on its standard input. Raises ``CommandError``.
Run: TypeAlias = Callable[[Sequence[str], str], Output]


def run_here(argv: Sequence[str], stdin: str = "") -> Output:
    """Run a command on this machine.

    Raises:
        CommandError: it does not exist, or took too long.
    """
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            env=_environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise NoCommandError(f"{argv[0]} is not installed on this machine") from None
    except OSError as error:
        raise NoCommandError(f"{argv[0]} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise CommandError(f"{argv[0]} did not answer in {TIMEOUT_S:.0f} seconds") from None
    return Output(done.returncode, done.stdout, done.stderr)


def over_ssh(host: str, run: Run = run_here) -> Run:
    """What runs commands on ``host``, as ssh's own configuration knows it."""

    def run_there(argv: Sequence[str], stdin: str = "") -> Output:
        command = ["ssh", "-o", "BatchMode=yes", host, "--", shlex.join(argv)]
        done = run(command, stdin)
        if done.code == _SSH_FAILED:
            raise CommandError(f"{host} cannot be reached: {done.complaint}")
        return done

    return run_there


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN_SETTINGS)}
    return {**kept, "LC_ALL": "C"}
