"""Printing: data on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from diloco_cloud.cli import exit_codes
from diloco_cloud.store.uris import plain_uri, store_text

if TYPE_CHECKING:
    from rich.console import Console

    from diloco_cloud.run import Run
    from diloco_cloud.run.spec import RunSpec
    from diloco_cloud.run.status import RunStatus

#: Columns of a table that goes to a file or a pipe, where cutting it short would help nobody.
_PIPE_WIDTH = 160


def console(*, err: bool = False) -> Console:
    """A rich console on stdout or stderr; NO_COLOR and pipes are honoured."""
    from rich.console import Console

    stream = sys.stderr if err else sys.stdout
    width = None if stream.isatty() else _PIPE_WIDTH
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def note(text: str) -> None:
    """A line for people."""
    click.echo(text, err=True)


def print_json(value: Any, *, compact: bool = False) -> None:
    """A JSON document on stdout."""
    click.echo(json.dumps(value, indent=None if compact else 2, ensure_ascii=False))


def status_json(run: Run, status: RunStatus) -> dict[str, Any]:
    """What ``--json`` prints of a run."""
    return {"store": run.store_uri, **status.to_json()}


def next_steps(run: Run, *, unsupervised: bool = False) -> None:
    """The commands one types after a launch, with the real id.

    Args:
        run: the run.
        unsupervised: nobody starts again what dies, though the run allows it.
    """
    steps = {"follow its logs": "logs -f", "look at it": "status"}
    if unsupervised and run.spec.max_restarts > 0:
        steps["restart what dies"] = "supervise"
    steps["stop it"] = "cancel"
    width = max(map(len, steps)) + 1
    for what, verb in steps.items():
        note(f"  {what + ':':{width}} diloco-cloud {verb} {_where(run)}")


@contextlib.contextmanager
def going_on(run: Run, again: str, *, unsupervised: bool = False) -> Iterator[None]:
    """Let Ctrl-C end the command, and say that it has not ended the run.

    Args:
        run: the run.
        again: the command, as it is typed to come back.
        unsupervised: nobody starts again from now on what dies, as far as is known here.
    """
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends this at once
        where = _where(run)
        goes_on = "goes on, and what dies may stay dead" if unsupervised else "goes on"
        note(
            f"\n{run.run_id} {goes_on}; to come back: diloco-cloud {again} {where}; "
            f"to stop it: diloco-cloud cancel {where}"
        )
        raise click.exceptions.Exit(exit_codes.INTERRUPTED) from None


def _where(run: Run) -> str:
    """The arguments that find a run again from any directory."""
    return f"{run.run_id} --store {shlex.quote(store_text(run.store_uri))}"


def count_text(count: int) -> str:
    """ "1 replica", or "2 replicas"."""
    return f"{count} replica" if count == 1 else f"{count} replicas"


def jobs_text(spec: RunSpec) -> str:
    """ "2 replicas", or "2 replicas and 1 reducer"."""
    reducers = "1 reducer" if spec.reducers == 1 else f"{spec.reducers} reducers"
    replicas = count_text(spec.replicas)
    return f"{replicas} and {reducers}" if spec.reducers else replicas


def places_text(spec: RunSpec) -> str:
    """ "modal", or "modal (2) and hf-jobs (2)"."""
    places = [f"{backend} ({len(ranks)})" for backend, ranks in spec.ranks_by_backend.items()]
    if len(places) == 1:
        return spec.backend
    return f"{', '.join(places[:-1])} and {places[-1]}"


def result_place(run: Run, status: RunStatus) -> None:
    """Where the trained model is, once there is one."""
    model = run.results().model if status.state == "succeeded" else None
    if model is not None:
        note(f"The model is {store_text(plain_uri(run.uri))}/{model}")


def replicas_text(ranks: Sequence[int]) -> str:
    """ "replica 3", or "replicas 0, 1"."""
    noun = "replica" if len(ranks) == 1 else "replicas"
    return f"{noun} {', '.join(map(str, ranks))}"
