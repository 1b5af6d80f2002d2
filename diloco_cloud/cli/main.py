"""The ``diloco-cloud`` command.

Subcommands are imported when they are called, so that ``--help`` answers at once.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from typing import Any, Final, NoReturn

import click

from diloco_cloud import __version__
from diloco_cloud.cli import exit_codes

#: Name, aliases, module below ``diloco_cloud.cli``, one line of help.
COMMANDS: Final = {
    "launch": ((), "launch", "Start a run and follow it."),
    "ls": (("ps", "list"), "ls", "List the runs of a store."),
    "status": ((), "status", "Show who is in which round, who is missing and why."),
    "logs": ((), "logs", "Show the logs of all replicas."),
    "wait": ((), "wait", "Wait for a run to end; the exit code tells how."),
    "supervise": ((), "supervise", "Start replicas of a run again that die, until it has ended."),
    "cancel": ((), "cancel", "Ask replicas to stop."),
    "resume": ((), "resume", "Start replicas again that ended early."),
    "down": ((), "down", "Delete everything a run has in its store."),
    "export": ((), "export", "Print what starts a run's replicas on Kubernetes or by SkyPilot."),
    "chaos": ((), "chaos", "Rehearse failure on this machine."),
}
_ALIASES: Final = {alias: name for name, (aliases, *_) in COMMANDS.items() for alias in aliases}


class CommandGroup(click.Group):
    """Imports a command when it is called, and turns errors into a message and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = _ALIASES.get(cmd_name, cmd_name)
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"diloco_cloud.cli.{COMMANDS[name][1]}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and name not in _ALIASES and not name.startswith("-"):
            import difflib

            near = difflib.get_close_matches(name, [*COMMANDS, *_ALIASES], n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [
            (", ".join((name, *aliases)), text) for name, (aliases, _, text) in COMMANDS.items()
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        from diloco_cloud.cli.variables import warn_of_misspelt

        warn_of_misspelt(os.environ)
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except KeyboardInterrupt:
            ctx.exit(exit_codes.INTERRUPTED)
        except BrokenPipeError:  # `| head` has seen enough
            raise
        except Exception as error:
            _report(ctx, error)


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    no_args_is_help=True,
    epilog="""\b
Examples:
  diloco-cloud launch --replicas 4 --rounds 20
  diloco-cloud logs -f RUN
  diloco-cloud status RUN --store s3://bucket/runs

\b
Exit codes of launch, wait, supervise and logs -f: 0 the run succeeded, 100 failed, 101 has not
finished, 103 was cancelled. Of every command: 1 an error of its own, 2 a wrong request, 102 no such
run, 130 interrupted.
""",
)
@click.version_option(__version__, "-V", "--version", prog_name="diloco-cloud")
def cli() -> None:
    """Train one model on many unrelated GPUs that meet only in an object-store bucket.

    RUN is a run's id. The store is --store, else $DILOCO_STORE, else ./runs.
    """


def main() -> None:
    """The console script."""
    warnings.formatwarning = lambda message, *_, **__: f"Warning: {message}\n"
    logging.addLevelName(logging.WARNING, "Warning")
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)  # on stderr
    cli(prog_name="diloco-cloud")


def _report(ctx: click.Context, error: Exception) -> NoReturn:
    """Say what happened and what to do about it, and end the command."""
    from diloco_cloud.errors import DilocoError

    if os.environ.get("DILOCO_DEBUG") == "1":
        raise error
    if isinstance(error, DilocoError):
        click.echo(f"Error: {error.message}", err=True)
        if error.fix:
            click.echo(f"  {error.fix}", err=True)
    else:
        click.echo(f"Error: {type(error).__name__}: {error}", err=True)
        click.echo("  DILOCO_DEBUG=1 shows where it happened.", err=True)
    ctx.exit(exit_codes.of_error(error))


if __name__ == "__main__":
    main()
