"""``diloco-cloud logs``."""

from __future__ import annotations

import contextlib
import datetime

import click

from diloco_cloud.cli import exit_codes, options, output
from diloco_cloud.run import Run
from diloco_cloud.run.logs import LogLine


@click.command("logs")
@options.run_argument
@options.store_option
@click.option("-f", "--follow", is_flag=True, help="Go on until the replicas have ended.")
@click.option("-n", "--tail", metavar="N", type=click.IntRange(min=0), help="The last N lines.")
@click.option("--since", metavar="TIME", type=options.Duration(), help="The last 10m, 2h, …")
@options.replica_option
@click.option("--timestamps", is_flag=True, help="Begin each line with its time.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    run_id: str,
    store: str | None,
    follow: bool,
    tail: int | None,
    since: float | None,
    ranks: tuple[int, ...],
    timestamps: bool,
) -> None:
    """Show the logs of all replicas, in the order of their time.

    With --follow the exit code tells how the run ended, as that of `wait` does.
    """
    run = Run.open(options.find_store(store), run_id)
    lines = run.logs(follow=follow, tail=tail, since=since, ranks=ranks or None)
    many = run.spec.replicas > 1 and len(set(ranks)) != 1
    with output.going_on(run, "logs -f") if follow else contextlib.nullcontext():
        for line in lines:
            click.echo(_format(line, many=many, timestamps=timestamps))
    if follow:
        ctx.exit(exit_codes.of_state(run.status().state))


def _format(line: LogLine, *, many: bool, timestamps: bool) -> str:
    prefix = f"replica/{line.rank} " if many else ""
    if timestamps and line.time is not None:
        moment = datetime.datetime.fromtimestamp(line.time, datetime.UTC)
        prefix = moment.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z " + prefix
    return prefix + line.text
