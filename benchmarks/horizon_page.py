"""The page of ``outer_horizon.py``: its arms as tables."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from measured import table

from diloco_cloud.horizon import outer_step

TITLE = "Outer steps by the number of rounds"


class Row(NamedTuple):
    """What the arms of one line have in common."""

    task: str
    rounds: int
    sync_every: int
    replicas: int


class Outer(NamedTuple):
    """Outer learning rate and momentum."""

    lr: float
    momentum: float


#: By line and merge, for each outer step its loss and the inner learning rate it has it with.
Best = Mapping[tuple[Row, str], Mapping[Outer, tuple[float, float]]]


def best_of(arms: Sequence[Mapping[str, Any]]) -> Best:
    """Of each outer step the best mean over the seeds, among the inner learning rates."""
    seeds: dict[Any, list[float]] = defaultdict(list)
    for arm in arms:
        row = Row(*(arm[name] for name in Row._fields))
        seeds[row, arm["merge"], Outer(arm["lr"], arm["momentum"]), arm["peak"]].append(arm["loss"])
    most: dict[Any, int] = defaultdict(int)
    for (row, merge, *_), losses in seeds.items():
        most[row, merge] = max(most[row, merge], len(losses))
    found: dict[Any, dict[Outer, tuple[float, float]]] = defaultdict(dict)
    for (row, merge, outer, peak), losses in seeds.items():
        if len(losses) == most[row, merge]:
            mine = (statistics.fmean(losses), peak)
            found[row, merge][outer] = min(mine, found[row, merge].get(outer, mine))
    return found


def page(arms: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The page's text, and what it shows as values."""
    best = best_of(arms)
    regrets = {row: _regret(row, found) for (row, merge), found in best.items() if merge == "mean"}
    worst = max(regrets.values())
    text = f"""
N replicas in one process, with the library's own merge and outer optimizer;
"language" is the rehearsals' tiny model, whose loss is exact; "text" is the default trainer's
transformer (two layers of width 48, 4 sequences of 64 bytes per step) on the standard library's
sources. Losses in nats per token, after all rounds; each is the best over the inner learning rates
tried (language 0.01, 0.02, 0.04; text 0.003, 0.006), mean over the seeds, and in brackets what it
lacks of the best of its line.

## Plain mean

{_outer_table(best, "mean")}

"auto" is what `outer_optimizer = "auto"` takes. At worst it lacks {worst:.1%}.

## Directions and lengths averaged on their own (RDA)

{_outer_table(best, "rda")}

## The best of both, with the seeds and inner learning rates that both have

{_merge_table(best_of(_in_both(arms)))}
"""
    values = {
        "best": [
            {**row._asdict(), "merge": merge, **outer._asdict(), "loss": loss, "peak": peak}
            for (row, merge), found in best.items()
            for outer, (loss, peak) in found.items()
        ],
        "auto_worst_regret": worst,
    }
    return text, values


def _in_both(arms: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Arms that have a counterpart with the other merge."""

    def key(arm: Mapping[str, Any]) -> tuple[Any, ...]:
        names = (*Row._fields, *Outer._fields, "peak", "seed")
        return tuple(arm[name] for name in names)

    mean, rda = ({key(arm) for arm in arms if arm["merge"] == merge} for merge in ("mean", "rda"))
    return [arm for arm in arms if key(arm) in mean & rda]


def _auto(row: Row) -> Outer:
    step = outer_step("auto", row.rounds, row.sync_every)
    return Outer(step.lr, step.momentum)


def _regret(row: Row, found: Mapping[Outer, tuple[float, float]]) -> float:
    """What the rule's choice lacks of the best."""
    least = min(loss for loss, _ in found.values())
    return found[_auto(row)][0] / least - 1 if _auto(row) in found else 0.0


def _outer_table(best: Best, merge: str) -> str:
    rows = sorted(row for row, of in best if of == merge)
    outers = sorted({outer for row in rows for outer in best[row, merge]}, key=_gain)
    header = [*("task", "N", "H", "rounds"), *(f"lr {o.lr:g}, mu {o.momentum:g}" for o in outers)]
    lines = []
    for row in rows:
        found = best[row, merge]
        cells = [_cell(found, outer) for outer in outers]
        line = [row.task, row.replicas, row.sync_every, row.rounds, *cells]
        if merge == "mean":
            auto = _auto(row)
            line.append(f"lr {auto.lr:g}, mu {auto.momentum:g} (+{_regret(row, found):.1%})")
        lines.append(line)
    return table([*header, "auto"] if merge == "mean" else header, lines)


def _cell(found: Mapping[Outer, tuple[float, float]], outer: Outer) -> str:
    if outer not in found:
        return ""
    loss = found[outer][0]
    least = min(other for other, _ in found.values())
    return f"**{loss:.4f}**" if loss == least else f"{loss:.4f} (+{loss / least - 1:.1%})"


def _merge_table(best: Best) -> str:
    rows = sorted({row for row, _ in best if (row, "rda") in best and (row, "mean") in best})
    lines = []
    for row in rows:
        (mean, mean_outer), (rda, rda_outer) = (
            min((loss, outer) for outer, (loss, _) in best[row, merge].items())
            for merge in ("mean", "rda")
        )
        lines.append(
            [
                *(row.task, row.replicas, row.sync_every, row.rounds),
                f"{mean:.4f} (lr {mean_outer.lr:g}, mu {mean_outer.momentum:g})",
                f"{rda:.4f} (lr {rda_outer.lr:g}, mu {rda_outer.momentum:g})",
                f"{rda / mean - 1:+.1%}",
            ]
        )
    return table(["task", "N", "H", "rounds", "best with mean", "best with RDA", "RDA"], lines)


def _gain(outer: Outer) -> float:
    """By how much a constant pseudo-gradient is amplified in the long run."""
    return outer.lr / (1 - outer.momentum)
