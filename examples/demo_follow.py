"""Shows runs while they go on: a bar per replica, or a line now and then without a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from diloco_cloud import Run
from diloco_cloud.errors import DilocoError
from diloco_cloud.run.status import ReplicaView, RunStatus

_INTERVAL = 0.5
_LINE_INTERVAL = 10.0


def follow(console: Console, runs: Sequence[Run]) -> None:
    """Watch ``runs`` side by side until all have ended.

    Raises:
        DilocoError: a replica failed or was cancelled.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars = [_add_bars(progress, run) for run in runs]
        printed = time.monotonic()
        while True:
            statuses = [run.status() for run in runs]
            for tasks, status in zip(bars, statuses, strict=True):
                for task, view in zip(tasks, status.replicas, strict=True):
                    _update(progress, task, view)
            _check(statuses)
            if not console.is_terminal and time.monotonic() - printed > _LINE_INTERVAL:
                printed = time.monotonic()
                console.print("; ".join(map(_line, statuses)), soft_wrap=True, highlight=False)
            if all(status.is_terminal for status in statuses):
                return
            time.sleep(_INTERVAL)


def _add_bars(progress: Progress, run: Run) -> list[TaskID]:
    spec = run.spec
    total = spec.sync_every * (spec.rounds or 0)
    names = [f"replica {rank}" for rank in range(spec.replicas)] if spec.replicas > 1 else ["alone"]
    return [progress.add_task(name, total=total, note="starting") for name in names]


def _update(progress: Progress, task: TaskID, view: ReplicaView) -> None:
    note = view.phase or view.state
    if view.loss is not None:
        speed = f"{view.tokens_per_s:,.0f} tokens/s" if view.tokens_per_s else ""
        note = f"{note:<9} round {view.round or 0:>3}  loss {view.loss:.2f}  {speed}"
    done = progress.tasks[task].total if view.state == "succeeded" else view.inner_step
    progress.update(task, completed=done or 0, note=note)


def _line(status: RunStatus) -> str:
    losses = [view.loss for view in status.replicas if view.loss is not None]
    loss = f", loss {sum(losses) / len(losses):.2f}" if losses else ""
    return f"{status.run_id} {status.state}, round {status.round or 0} of {status.rounds}{loss}"


def _check(statuses: Sequence[RunStatus]) -> None:
    for status in statuses:
        for view in status.replicas:
            if view.state in ("failed", "cancelled"):
                tail = "\n".join(view.log_tail)
                raise DilocoError(
                    f"replica {view.rank} of {status.run_id} {view.state}: {view.error}\n{tail}"
                )
