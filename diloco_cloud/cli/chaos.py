"""``diloco-cloud chaos``."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from diloco_cloud.cli import exit_codes, options, output

if TYPE_CHECKING:
    from diloco_cloud.chaos.report import Report


@click.command(
    "chaos",
    epilog="Exit codes: 0 nothing that must never be was, 1 something was.",
)
@click.option("--replicas", type=click.IntRange(min=2), default=32, show_default=True)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=3.0,
    show_default=True,
    help="Length of the storm; a fault-free run of half the length precedes it.",
)
@click.option(
    "--faults-per-hour",
    type=click.FloatRange(min=0, min_open=True),
    help="Before --scale.  [default: 90 for 32 replicas, others in proportion]",
)
@click.option(
    "--scale",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="How many times faster than life: more faults, shorter ones, quicker heartbeats.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the faults.")
@click.option(
    "--round",
    "round_s",
    type=options.Duration(),
    metavar="TIME",
    help="Training between two syncs.  [default: what this machine has the time for]",
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep the runs and the replicas' logs there.",
)
@options.json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    replicas: int,
    minutes: float,
    faults_per_hour: float | None,
    scale: float,
    seed: int,
    round_s: float | None,
    keep: Path | None,
    as_json: bool,
) -> None:
    """Rehearse failure on this machine: a run of small replicas, and a storm of faults.

    The replicas are real processes that train a tiny model, each at the pace of an accelerator of
    its own. They are killed, stopped, and cut off from the store, at random; a supervisor starts
    again what dies. Prints what that cost beside a fault-free run, and what others report.
    """
    from diloco_cloud.chaos.compare import Settings, rehearse

    settings = Settings(
        replicas=replicas,
        seconds=60 * minutes,
        faults_per_hour=faults_per_hour,
        scale=scale,
        seed=seed,
        round_s=round_s,
    )
    with _directory(keep) as directory:
        report = rehearse(settings, directory, say=output.note)
    if as_json:
        output.print_json(report.to_json())
    else:
        output.console().print(_table(report))
    for line in report.violations:
        output.note(f"Violation: {line}")
    ctx.exit(exit_codes.OWN_ERROR if report.violations else exit_codes.SUCCEEDED)


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="diloco-chaos-") as directory:
        yield Path(directory)


def _table(report: Report) -> object:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", "this machine", "others"):
        table.add_column(name)
    for row in report.rows():
        table.add_row(row.what, row.ours, row.others)
    return table
