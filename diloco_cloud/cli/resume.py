"""``diloco-cloud resume``."""

from __future__ import annotations

import click

from diloco_cloud.cli import options, output
from diloco_cloud.run import Run


@click.command("resume")
@options.run_argument
@options.store_option
@options.replica_option
def command(run_id: str, store: str | None, ranks: tuple[int, ...]) -> None:
    """Start replicas again that ended early.

    They go on from the run's newest state, with the settings it was launched with.
    """
    run = Run.open(options.find_store(store), run_id)
    started = run.resume(ranks or None)
    output.note(f"Started {output.replicas_text(started)} of {run_id} again.")
    output.next_steps(run)
