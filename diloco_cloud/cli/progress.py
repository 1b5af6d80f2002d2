"""Follows a run on a terminal: a live table, or a line per change where there is none."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from diloco_cloud.cli import output

if TYPE_CHECKING:
    from rich.console import Console

    from diloco_cloud.run import Run
    from diloco_cloud.run.status import RunStatus

#: Seconds between two looks: a directory is free to read, a bucket bills each request.
_LOCAL_INTERVAL = 1.0
_REMOTE_INTERVAL = 3.0


def follow(run: Run, *, err: bool) -> RunStatus:
    """Show the run until it has ended; returns its last status.

    Args:
        run: the run.
        err: show it on stderr instead of stdout.
    """
    from diloco_cloud.cli.tables import print_failures

    console = output.console(err=err)
    status = _live(run, console) if console.is_terminal else _lines(run, console)
    print_failures(console, status)
    return status


def interval(run: Run) -> float:
    """Seconds between two looks at ``run``."""
    return _LOCAL_INTERVAL if run.uri.startswith("file:") else _REMOTE_INTERVAL


def _live(run: Run, console: Console) -> RunStatus:
    from rich.live import Live

    from diloco_cloud.cli.tables import status_view

    status = run.status()
    view = status_view(status, console.width)
    with Live(view, console=console, auto_refresh=False) as live:
        for status in run.watch(interval(run)):
            live.update(status_view(status, console.width), refresh=True)
    return status


def _lines(run: Run, console: Console) -> RunStatus:
    from diloco_cloud.cli.tables import headline

    shown = None
    status = None
    for status in run.watch(interval(run)):
        states = tuple(view.state for view in status.replicas)
        if (status.state, status.round, states) == shown:
            continue
        shown = (status.state, status.round, states)
        running = states.count("running")
        line = headline(status)
        console.print(f"{time.strftime('%H:%M:%S')}  {line}  {running}/{len(states)} running")
    assert status is not None  # watch yields at least once
    return status
