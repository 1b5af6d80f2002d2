"""``diloco-cloud supervise``."""

from __future__ import annotations

import time

import click

from diloco_cloud.cli import exit_codes, options, output
from diloco_cloud.run import Run
from diloco_cloud.run.restarter import Event


@click.command(
    "supervise",
    epilog="Exit codes: 0 succeeded, 100 failed, 101 not finished, 102 not found, 103 cancelled.",
)
@options.run_argument
@options.store_option
@click.option(
    "--max-restarts",
    metavar="N",
    type=click.IntRange(min=0),
    help="In a row, of a replica that gets into no round.  [default: the run's own]",
)
@options.json_option
@click.pass_context
def command(
    ctx: click.Context, /, run_id: str, store: str | None, max_restarts: int | None, as_json: bool
) -> None:
    """Start replicas of a run again that die, until it has ended.

    Replicas that are preempted, lost, killed or out of time are started again; one that fails by
    an error of its own is not. Any machine that may launch replicas can do it, several at once
    too; the run goes on without any. Prints a line per event; with --json, one of JSON.
    """
    from diloco_cloud.cli.progress import interval

    run = Run.open(options.find_store(store), run_id)

    def say(event: Event) -> None:
        if as_json:
            output.print_json(event.to_json(), compact=True)
        else:
            click.echo(event_line(event))

    pause = interval(run)
    with output.going_on(run, "supervise", unsupervised=True):
        status = run.supervise(max_restarts=max_restarts, on_event=say, interval=pause)
    if as_json:
        output.print_json(output.status_json(run, status), compact=True)
    else:
        click.echo(status.state.upper())
    output.result_place(run, status)
    ctx.exit(exit_codes.of_state(status.state))


def event_line(event: Event) -> str:
    """An event as people read it, with the time of day."""
    return f"{time.strftime('%H:%M:%S', time.localtime(event.time))}  {event.text}"
