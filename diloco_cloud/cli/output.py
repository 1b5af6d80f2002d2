"""Printing: data on stdout, everything else on stderr."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import click

from diloco_cloud.store.uris import plain_uri

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


def store_text(uri: str) -> str:
    """A store as people write it: a local one as a path."""
    parts = urlsplit(uri)
    return unquote(parts.path) if parts.scheme == "file" else uri


def next_steps(run: Run, *, unsupervised: bool = False) -> None:
    """The commands one types after a launch, with the real id.

    Args:
        run: the run.
        unsupervised: nobody starts again what dies, though the run allows it.
    """
    where = f"{run.run_id} --store {shlex.quote(store_text(run.store_uri))}"
    note("  follow its logs:  diloco-cloud logs -f " + where)
    note("  look at it:       diloco-cloud status " + where)
    if unsupervised and run.spec.max_restarts > 0:
        note("  restart what dies: diloco-cloud supervise " + where)
    note("  stop it:          diloco-cloud cancel " + where)


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
