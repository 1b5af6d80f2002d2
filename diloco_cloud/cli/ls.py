"""``diloco-cloud ls``, also ``ps`` and ``list``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import click

from diloco_cloud.cli import options, output
from diloco_cloud.run import Run, list_runs


@click.command("ls")
@options.store_option
@options.json_option
@click.option("-q", "--quiet", is_flag=True, help="Print ids only.")
def command(store: str | None, as_json: bool, quiet: bool) -> None:
    """List the runs of a store, newest first."""
    runs = list_runs(options.find_store(store))
    if quiet:
        for run in runs:
            click.echo(run.run_id)
        return
    with ThreadPoolExecutor(8, thread_name_prefix="ls") as pool:
        statuses = list(pool.map(Run.status, runs))
    if as_json:
        pairs = zip(runs, statuses, strict=True)
        output.print_json([output.status_json(run, status) for run, status in pairs])
    elif statuses:
        from diloco_cloud.cli.tables import run_table

        output.console().print(run_table(statuses))
    else:
        output.note("No runs here.")
