"""``diloco-cloud status``."""

from __future__ import annotations

import click

from diloco_cloud.cli import options, output
from diloco_cloud.run import Run


@click.command("status")
@options.run_argument
@options.store_option
@click.option("-w", "--watch", is_flag=True, help="Go on until the run has ended.")
@options.json_option
def command(run_id: str, store: str | None, watch: bool, as_json: bool) -> None:
    """Show who is in which round, who is missing and why.

    With --watch --json, one line of JSON per look.
    """
    run = Run.open(options.find_store(store), run_id)
    if as_json:
        _print_json(run, watch=watch)
        return
    if watch:
        from diloco_cloud.cli.progress import follow

        with output.going_on(run, "status -w"):
            follow(run, err=False)
        return
    from diloco_cloud.cli.tables import print_failures, status_view

    status = run.status()
    console = output.console()
    console.print(status_view(status, console.width))
    print_failures(console, status)


def _print_json(run: Run, *, watch: bool) -> None:
    from diloco_cloud.cli.progress import interval

    if not watch:
        output.print_json(output.status_json(run, run.status()))
        return
    with output.going_on(run, "status -w --json"):
        for status in run.watch(interval(run)):
            output.print_json(output.status_json(run, status), compact=True)
