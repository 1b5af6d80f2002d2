"""Follows a run on a terminal: a live table, or a line per change where there is none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from diloco_cloud.cli import output
from diloco_cloud.store.uris import plain_uri

if TYPE_CHECKING:
    from rich.console import Console

    from diloco_cloud.run import Run
    from diloco_cloud.run.restarter import Event
    from diloco_cloud.run.status import RunStatus

#: Seconds between two looks: a directory is free to read, a bucket bills each request.
_LOCAL_INTERVAL = 1.0
_REMOTE_INTERVAL = 3.0


def follow(run: Run, *, err: bool, supervise: bool = False) -> RunStatus:
    """Show the run until it has ended; returns its last status.

    Args:
        run: the run.
        err: show it on stderr instead of stdout.
        supervise: start again what dies.
    """
    from diloco_cloud.cli.tables import print_failures

    console = output.console(err=err)

    def say(event: Event) -> None:
        console.print(f"{_time(event.time)}  {event.text}", soft_wrap=True)

    looks = run.supervisor(on_event=say).watch if supervise else run.watch
    show = _live if console.is_terminal else _lines
    status = show(looks(interval(run)), console)
    print_failures(console, status)
    return status


def interval(run: Run) -> float:
    """Seconds between two looks at ``run``."""
    return _LOCAL_INTERVAL if plain_uri(run.uri).startswith("file:") else _REMOTE_INTERVAL


def _live(statuses: Iterator[RunStatus], console: Console) -> RunStatus:
    from rich.live import Live

    from diloco_cloud.cli.tables import status_view

    status = next(statuses)
    with Live(status_view(status, console.width), console=console, auto_refresh=False) as live:
        for status in statuses:
            live.update(status_view(status, console.width), refresh=True)
    return status


def _lines(statuses: Iterator[RunStatus], console: Console) -> RunStatus:
    from diloco_cloud.cli.tables import headline

    shown = None
    status = None
    for status in statuses:
        states = tuple(view.state for view in status.replicas)
        if (status.state, status.round, states) == shown:
            continue
        shown = (status.state, status.round, states)
        running = states.count("running")
        line = headline(status)
        console.print(f"{_time(time.time())}  {line}  {running}/{len(states)} running")
    assert status is not None  # there is at least one
    return status


def _time(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
