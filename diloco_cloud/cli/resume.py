"""``diloco-cloud resume``."""

from __future__ import annotations

import click

from diloco_cloud.cli import options, output
from diloco_cloud.run import Run


@click.command("resume")
@options.run_argument
@options.store_option
@options.replica_option
@click.option(
    "--replicas",
    metavar="N",
    type=options.Replicas(),
    help="The run has so many replicas from now on, or BACKEND=N,…",
)
@click.option("--backend", metavar="NAME", help="Where to start them.  [default: where they were]")
def command(
    run_id: str,
    store: str | None,
    ranks: tuple[int, ...],
    replicas: int | dict[str, int] | None,
    backend: str | None,
) -> None:
    """Start replicas again that ended early, or more of them.

    They go on from the run's newest state, with the settings it was launched with.
    """
    run = Run.open(options.find_store(store), run_id)
    started = run.resume(ranks or None, replicas=replicas, backend=backend)
    if started:
        output.note(f"Started {output.replicas_text(started)} of {run_id}.")
    else:
        count = sum(replicas.values()) if isinstance(replicas, dict) else replicas or 0
        output.note(f"{run_id} has {output.count_text(count)} now; there was none to start.")
    output.next_steps(run, unsupervised=True)
