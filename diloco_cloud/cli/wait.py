"""``diloco-cloud wait``."""

from __future__ import annotations

import click

from diloco_cloud.cli import exit_codes, options, output
from diloco_cloud.run import Run


@click.command(
    "wait",
    epilog="Exit codes: 0 succeeded, 100 failed, 101 not finished in time, 102 not found, "
    "103 cancelled.",
)
@options.run_argument
@options.store_option
@click.option("--timeout", metavar="TIME", type=options.Duration(), help="Wait no longer.")
@options.json_option
@click.pass_context
def command(
    ctx: click.Context, /, run_id: str, store: str | None, timeout: float | None, as_json: bool
) -> None:
    """Wait for a run to end; the exit code tells how."""
    run = Run.open(options.find_store(store), run_id)
    with output.going_on(run, "wait"):
        status = run.wait(timeout)
    if as_json:
        output.print_json(output.status_json(run, status))
    else:
        click.echo(status.state.upper())
    output.result_place(run, status)
    ctx.exit(exit_codes.of_state(status.state))
