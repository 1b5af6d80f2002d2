"""``diloco-cloud down``."""

from __future__ import annotations

import click

from diloco_cloud.cli import options, output
from diloco_cloud.run import Run


@click.command("down")
@options.run_argument
@options.store_option
@options.yes_option
def command(run_id: str, store: str | None, yes: bool) -> None:
    """Delete everything a run has in its store, results too.

    A run that is still going is cancelled first.
    """
    run = Run.open(options.find_store(store), run_id)
    status = run.status()
    going = "" if status.is_terminal else f", which is {status.state.upper()},"
    options.confirm(f"Delete {run_id}{going} and its results from {run.store_uri}?", yes=yes)
    count = run.down(cancel=True)
    output.note(f"Deleted {run_id}: {count} objects.")
