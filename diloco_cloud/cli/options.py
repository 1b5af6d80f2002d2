"""Options and arguments that several commands share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from diloco_cloud.errors import ConfigError, UsageError
from diloco_cloud.run.by_backend import parse_replicas
from diloco_cloud.run.config import LOCAL_STORE
from diloco_cloud.run.durations import parse_duration

_Command = TypeVar("_Command", bound=Callable[..., Any])


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """Seconds, from "90", "30s", "10m", "2h" or "1d"."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            return parse_duration(value)
        except ConfigError as error:
            self.fail(f"{error.message}. {error.fix}", param, ctx)


class SwitchableDuration(Duration):
    """A duration, or "off"."""

    name = "duration or off"

    def convert(  # type: ignore[override]
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | str:
        return "off" if value == "off" else super().convert(value, param, ctx)


class Switchable(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """A number, or "off"."""

    name = "number or off"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | str:
        if value == "off":
            return "off"
        try:
            return float(value)
        except ValueError:
            self.fail(f'{value!r} is neither a number nor "off".', param, ctx)


class Replicas(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """A number, or numbers by backend: "modal=2,hf-jobs=2"."""

    name = "replicas"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | dict[str, int]:
        try:
            return parse_replicas(value)
        except ConfigError as error:
            self.fail(f"{error.message}. {error.fix}", param, ctx)


def run_argument(command: _Command) -> _Command:
    """The run's id."""
    return click.argument("run_id", metavar="RUN")(command)


def store_option(command: _Command) -> _Command:
    """Where the run is; for commands that read."""
    return click.option(
        "--store",
        metavar="URI",
        envvar="DILOCO_STORE",
        help=f"Where the run is.  [default: $DILOCO_STORE, else ./{LOCAL_STORE}]",
    )(command)


def replica_option(command: _Command) -> _Command:
    """A choice of ranks."""
    return click.option(
        "--replica",
        "ranks",
        metavar="RANK",
        type=click.IntRange(min=0),
        multiple=True,
        help="Only this replica; may be repeated.",
    )(command)


def json_option(command: _Command) -> _Command:
    """Output for programs."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def yes_option(command: _Command) -> _Command:
    """No questions."""
    return click.option("-y", "--yes", is_flag=True, help="Don't ask for confirmation.")(command)


def find_store(store: str | None) -> str:
    """The store that was named, else ``./runs`` where that exists.

    Raises:
        UsageError: neither.
    """
    if store:
        return store
    if Path(LOCAL_STORE).is_dir():
        return LOCAL_STORE
    raise UsageError(
        f"no store was named, and there is no ./{LOCAL_STORE} here",
        fix="Add --store URI, or set DILOCO_STORE.",
    )


def confirm(question: str, *, yes: bool) -> None:
    """Go on only if the user agrees.

    Raises:
        UsageError: there is nobody to ask.
        click.Abort: the user said no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{question} Nobody is there to answer.", fix="Add --yes.")
    click.confirm(question, abort=True, err=True)
