"""``diloco-cloud cancel``."""

from __future__ import annotations

import click

from diloco_cloud.cli import options, output
from diloco_cloud.run import Run


@click.command("cancel")
@options.run_argument
@options.store_option
@options.replica_option
def command(run_id: str, store: str | None, ranks: tuple[int, ...]) -> None:
    """Ask replicas to stop.

    May be repeated; replicas that have ended are left alone.
    """
    asked = Run.open(options.find_store(store), run_id).cancel(ranks or None)
    if asked:
        output.note(f"Asked {output.replicas_text(asked)} of {run_id} to stop.")
    else:
        output.note(f"Nothing to cancel: {'they' if ranks else run_id} had ended already.")
