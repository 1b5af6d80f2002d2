"""Tables of runs and replicas."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco_cloud.cli.output import replicas_text
from diloco_cloud.run.durations import format_duration
from diloco_cloud.run.status import ReplicaView, RunStatus
from diloco_cloud.run.views import why_ended

_BAR_WIDTH: Final = 40
#: Columns that a narrow terminal can do without.
_LEAST_FIRST: Final = (
    *("seen", "merged", "in rounds", "tokens/s", "backend", "inner step", "loss", "reward"),
    *("restarts", "doing"),
)
#: Between two columns; and what the last one, whose text may wrap, needs at least.
_GAP, _WHY_WIDTH = 3, 20
_NUMERIC: Final = (
    *("round", "inner step", "loss", "reward", "tokens/s", "merged", "in rounds", "restarts"),
)
_STYLES: Final = {
    "pending": "yellow",
    "running": "cyan",
    "succeeded": "green",
    "failed": "bold red",
    "cancelled": "magenta",
    "unknown": "yellow",
}


def state_text(state: str) -> Text:
    """A state in capitals, coloured."""
    return Text(state.upper(), style=_STYLES.get(state, ""))


def headline(status: RunStatus) -> Text:
    """One line: id, state, round, loss, reward, speed."""
    line = Text.assemble(status.run_id, "  ", state_text(status.state))
    if status.round is not None:
        line.append(f"  round {_round(status)}")
    for name in ("loss", "reward"):
        found = [getattr(view, name) for view in status.replicas]
        values = [value for value in found if value is not None]
        if values:
            line.append(f"  {name} {_figure(sum(values) / len(values))}")
    if status.tokens_per_s:
        line.append(f"  {status.tokens_per_s:,.0f} tokens/s")
    return line


def replica_table(status: RunStatus, width: int | None = None) -> Table:
    """One row per replica; columns that say nothing, or find no room, are left out."""
    why = dict(status.missing)
    columns: dict[str, list[str | Text]] = {
        "replica": [_name(view) for view in status.replicas],
        "backend": _backends(status),
        "state": [state_text(view.state) for view in status.replicas],
        "doing": [view.phase or "" for view in status.replicas],
        "round": [_number(view.round) for view in status.replicas],
        "inner step": [_number(view.inner_step) for view in status.replicas],
        "loss": [_figure(view.loss) for view in status.replicas],
        "reward": [_figure(view.reward) for view in status.replicas],
        "tokens/s": [_format(view.tokens_per_s, ",.0f") for view in status.replicas],
        "merged": [_format(view.merged, ",d") for view in status.replicas],
        "in rounds": [_share(view) for view in status.replicas],
        "restarts": [str(view.restarts or "") for view in status.replicas],
        "seen": [_seen(view) for view in status.replicas],
        "why": [_why(view, why.get(view.rank)) for view in status.replicas],
    }
    shown = {name: cells for name, cells in columns.items() if any(map(str, cells))}
    for name in _LEAST_FIRST:
        if width is not None and _width(shown) > width:
            shown.pop(name, None)
    table = _table(*shown)
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    return table


def status_view(status: RunStatus, width: int | None = None) -> RenderableType:
    """Headline, replicas, and what is out of the ordinary.

    Args:
        status: of one run.
        width: columns there are; by default as many as it takes.
    """
    parts: list[RenderableType] = [headline(status)]
    if status.rounds and status.round and status.state == "running":
        bar = Table.grid()  # a bar by itself does not end its line
        bar.add_row(ProgressBar(status.rounds, min(status.round, status.rounds), width=_BAR_WIDTH))
        parts.append(bar)
    parts.append(replica_table(status, width))
    parts += [Text(line, style="dim") for line in _company(status)]
    if status.note:
        parts.append(Text(f"The executor can't be asked here: {status.note}", style="yellow"))
    for left_out in status.excluded:
        text = f"Round {left_out['round']} left out replica {left_out['rank']}: "
        parts.append(Text(text + str(left_out["reason"])))
    return Group(*parts)


def _company(status: RunStatus) -> list[str]:
    """Who is alive, and how many are averaged: one may be well without the other."""
    lines = []
    if not status.is_terminal:
        lines.append(f"{len(status.alive)} of {status.size} replicas are alive.")
        if status.supervised:
            lines[0] += " What dies is started again."
        if status.reducers:
            lines.append(f"{status.reducers_alive} of {status.reducers} reducers are alive.")
    if status.breadth is not None:
        rounds = "round" if status.rounds_kept == 1 else f"{status.rounds_kept} rounds"
        averaged = f"{status.breadth:.3g} of {status.size} replicas were averaged"
        lines.append(f"In the last {rounds}, {averaged}.")
    return lines


def print_failures(console: Console, status: RunStatus) -> None:
    """What ended failed replicas and the end of a log, once for all that failed alike."""
    alike: dict[tuple[str, ...], list[ReplicaView]] = {}
    for view in status.replicas:
        if view.state == "failed" and view.log_tail:
            alike.setdefault(_failure(view), []).append(view)
    for first, *others in alike.values():
        names = replicas_text([view.rank for view in (first, *others)])
        whose = f"replica {first.rank}'s" if others else "its"
        said = f": {first.error}" if first.error else ""
        console.print(Text(f"{names} failed{said}", style="bold"), soft_wrap=True)
        console.print(Text(f"  the end of {whose} log:", style="dim"))
        for line in first.log_tail:
            console.print(Text(f"  {line}"), soft_wrap=True)


def run_table(statuses: Sequence[RunStatus]) -> Table:
    """One row per run."""
    table = _table("run", "state", "backend", "replicas", "round", "launched")
    for status in statuses:
        running = sum(view.state == "running" for view in status.replicas)
        total = status.size
        table.add_row(
            status.run_id,
            state_text(status.state),
            "+".join(status.backends) or status.backend,
            f"{running}/{total} running" if running else str(total),
            _round(status),
            f"{format_duration(time.time() - status.created_at)} ago",
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, header_style="dim")
    for column in columns:
        numeric = column in _NUMERIC
        justify: Literal["left", "right"] = "right" if numeric else "left"
        prose = column == "why"
        overflow: Literal["fold", "ellipsis"] = "fold" if prose else "ellipsis"
        table.add_column(column, justify=justify, no_wrap=not prose, overflow=overflow)
    return table


def _width(columns: Mapping[str, Sequence[str | Text]]) -> int:
    """Columns of a terminal that a table takes, less what the text of "why" can do without."""
    widest = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
    if "why" in widest:
        widest["why"] = min(widest["why"], _WHY_WIDTH)
    return sum(widest.values()) + _GAP * (len(widest) - 1)


def _failure(view: ReplicaView) -> tuple[str, ...]:
    """What tells one failure from another: its last words, whatever ranks and times they name."""
    return tuple(re.sub(r"\d+", "#", text) for text in (view.error or "", *view.log_tail[-3:]))


def _round(status: RunStatus) -> str:
    if status.round is None:
        return ""
    return f"{status.round}/{status.rounds}" if status.rounds else str(status.round)


def _why(view: ReplicaView, missing: str | None) -> str:
    if view.state == "failed":
        given_up = f"; not started again: {view.given_up}" if view.given_up else ""
        return why_ended(view) + given_up
    if view.waiting_for and view.state == "running":
        return "waits for " + ", ".join(map(str, view.waiting_for))
    if view.retired:
        return "retired"
    if missing is None and view.restarted_after is not None and not view.ended:
        return f"attempt {view.attempt}, after: {view.restarted_after}"
    return missing or ""


def _backends(status: RunStatus) -> list[str | Text]:
    """Where each replica is, if that is not the same for all."""
    names = [view.backend or "" for view in status.replicas]
    return [*names] if len(set(names)) > 1 else [""] * len(names)


def _share(view: ReplicaView) -> str:
    return "" if view.participation is None else f"{view.participation:.0%}"


def _seen(view: ReplicaView) -> str:
    if view.heartbeat_age_s is None or view.state in ("succeeded", "failed", "cancelled"):
        return ""
    return f"{format_duration(view.heartbeat_age_s)} ago"


def _name(view: ReplicaView) -> str:
    return f"{view.rank} (attempt {view.attempt})" if view.attempt else f"{view.rank}"


def _format(value: float | None, form: str) -> str:
    return "" if not value else format(value, form)


def _figure(value: float | None) -> str:
    """A loss or a reward. That of GRPO is near 0 on policy, and not to be shown as 0."""
    if value is None:
        return ""
    return format(value, ".4f" if value == 0 or abs(value) >= 1e-3 else ".1e")


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
