"""Kill a replica at every step of a round, in every role, and see whether anything is lost.

    python benchmarks/crash_matrix.py [--seeds 10] [--sample] [--only REGEX] [--name NAME]

Each run is four processes that train a small model over a directory; one of them is killed with
SIGKILL before, after or half-way through one request to the store, and started again by the
supervisor: at once in every second run, and in the others only when the survivors must long have
gone on without it. The seed chooses the round, the victim and everybody's pace.

What is checked of each run: the next decision comes within one deadline of the kill, and the killed
rank is in a decision within two of its restart, a deadline being what the survivors' own rules
said they would wait for it; one decision per round; every outer step taken anew by hand from the
contributions gives the same parameters before each round and at the end, where all replicas and the
exported result have them; and every token was merged once, or died with its process. A run that
misses a deadline while the machine is busy with other things, as its own arithmetic shows, is
repeated; what it missed is in the results too.

The table goes to benchmarks/results/NAME.md, and every kill to NAME.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from crash_cells import REPLICAS, SNAPSHOT_EVERY, SYNC_EVERY, Cell, cells
from forked_checks import Decision, ViolatedError, check, merged_tokens, replay
from forked_run import TOKENS, ForkedRun
from tripwire import Tripwire

RESULTS = Path(__file__).parent / "results"
#: Runs that are tried until one of a cell's seed meets its trap.
TRIES = 8
#: Who misses a deadline on a machine that is this many times slower than its processors, because
#: others use them, is given another run.
BUSY = 2.5
#: More than a deadline at the pace of these runs.
LATE_S = 0.5


@dataclass
class Kill:
    """One run and its death.

    Attributes:
        deadline_s: what the survivors' rules said they would wait at most.
        round_s: what a round took them before.
        next_s: from the kill to the next decision; None: there was none to come.
        back_s: from the restart to the first decision with the new life; None: likewise.
        lost: tokens that died with the process.
        slowdown: of the machine, by what else it had to do.
        missed: the fault is a deadline.
        discarded: what runs before this one missed on a busy machine, and how busy it was.
        fault: what was not as it must be, or "".
    """

    cell: str
    seed: int
    late: bool
    rank: int = -1
    round: int = -1
    key: str = ""
    deadline_s: float = 0.0
    round_s: float = 0.0
    next_s: float | None = None
    back_s: float | None = None
    lost: int = 0
    slowdown: float = 0.0
    missed: bool = False
    discarded: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    fault: str = ""


def kill(cell: Cell, seed: int, directory: Path, *, keep: bool = False) -> Kill | None:
    """One run; None if nobody came to be where it was to die."""
    rng = random.Random(f"{cell} {seed}")
    late = seed % 2 == 1 and cell.step.phase != "start"
    root = Path(tempfile.mkdtemp(prefix="crash-", dir=directory))
    tripwire = Tripwire(cell.traps(rng, root), replicas=REPLICAS, snapshot_every=SNAPSHOT_EVERY)
    pauses = [LATE_S if late and life == cell.step.lives else 0.0 for life in (1, 2)]
    run = ForkedRun(cell.job(rng), root, tripwire, restart_s=pauses, limit_s=40.0)
    tripwire.board = run.board
    found, began = Kill(str(cell), seed, late), time.monotonic()
    try:
        run.run()
        if not (root / "death").exists():
            return None
        _examine(run, cell, found)
    except (RuntimeError, ViolatedError) as error:
        found.fault = str(error)
    finally:
        found.wall_s = time.monotonic() - began
        if not (keep and found.fault):
            shutil.rmtree(root)
    if keep and found.fault:
        found.fault += f"\n(kept in {root})"
    return found


def _examine(run: ForkedRun, cell: Cell, found: Kill) -> None:
    """Check a finished run and measure what its death cost."""
    decisions = check(run)
    replay(run, [one.commit for one in decisions])
    death = json.loads((run.root / "death").read_text())
    found.rank, found.round, found.key = death["rank"], death["round"], death["key"]
    found.round_s = death["round_s"] or max(run.board.round_s)
    found.deadline_s = death["deadline_s"] or max(run.board.deadline_s)
    life = (death["rank"], death["attempt"])
    merged = merged_tokens([one.commit for one in decisions]).get(life, 0)
    found.lost = run.board.processed(*life) - merged
    restarted = run.started[life[0], life[1] + 1]
    found.next_s = _first_after(death["at"], decisions)
    found.back_s = _first_after(restarted, [one for one in decisions if _is_in(one, life)])
    found.slowdown = round(run.board.slowdown, 2)
    found.fault = _lateness(found, cell)
    found.missed = bool(found.fault)
    if not found.missed:
        found.fault = _loss(found, cell)


def _is_in(decision: Decision, killed: tuple[int, int]) -> bool:
    """Whether a later life of the killed rank is among the contributors."""
    return any(rank == killed[0] and attempt > killed[1] for rank, attempt in decision.lives)


def _first_after(moment: float, decisions: Sequence[Decision]) -> float | None:
    return min((one.at - moment for one in decisions if one.at > moment), default=None)


def _lateness(found: Kill, cell: Cell) -> str:
    """What was too late, or ""."""
    # Before the first round, everybody who was launched is waited for.
    limit = found.deadline_s * (2 if cell.step.phase == "start" else 1)
    if (found.next_s or 0.0) > limit:
        return f"the next decision took {found.next_s:.2f} s, not {limit:.2f} s"
    if (found.back_s or 0.0) > 2 * found.deadline_s:
        return f"back after {found.back_s:.2f} s, not {2 * found.deadline_s:.2f} s"
    return ""


def _loss(found: Kill, cell: Cell) -> str:
    """What was lost that must not be, or ""."""
    if (found.next_s is None or found.back_s is None) and not cell.step.is_last:
        return "the run ended without the killed replica"
    if found.lost > 2 * SYNC_EVERY * TOKENS:
        return f"{found.lost} tokens are lost: more than two rounds' work"
    return ""


def examined(cell: Cell, seed: int, directory: Path, *, keep: bool = False) -> Kill:
    """The run of one cell and seed, again where it tells nothing."""
    discarded: list[str] = []
    for again in range(TRIES):
        # Another seed where nobody came to be in the role, as a random committer may not.
        found = kill(cell, seed + 1000 * again, directory, keep=keep)
        while found and found.missed and found.slowdown > BUSY and len(discarded) < TRIES:
            discarded.append(f"{found.fault} (slowed down {found.slowdown} times)")
            found = kill(cell, seed + 1000 * again, directory, keep=keep)
        if found:
            found.discarded = discarded
            return found
    return Kill(str(cell), seed, late=False, fault="nobody came there")


# -- the table -----------------------------------------------------------------------------------

_HEAD = """\
| step | role | kills | passed | to the next decision, s | in rounds | until back, s |
|---|---|---|---|---|---|---|"""


def table(kills: Sequence[tuple[Cell, Kill]]) -> str:
    """A row for each step and role, both sides and all seeds together."""
    rows: dict[tuple[str, str], list[Kill]] = {}
    for cell, found in kills:
        rows.setdefault((f"{cell.step.phase}: {cell.step.name}", cell.who), []).append(found)
    lines = [_HEAD]
    for (step, role), mine in rows.items():
        passed = sum(not one.fault for one in mine)
        next_s = [one.next_s for one in mine if one.next_s is not None]
        rounds = [one.next_s / one.round_s for one in mine if one.next_s is not None]
        back_s = [one.back_s for one in mine if one.back_s is not None]
        cost = f"{_figures(next_s, 2)} | {_figures(rounds, 1)} | {_figures(back_s, 2)}"
        lines.append(f"| {step} | {role} | {len(mine)} | {passed} | {cost} |")
    return "\n".join(lines)


def _figures(values: Sequence[float], digits: int) -> str:
    """Median and worst."""
    if not values:
        return "–"
    return f"{median(values):.{digits}f}, at worst {max(values):.{digits}f}"


def summary(kills: Sequence[tuple[Cell, Kill]], seconds: float) -> dict[str, Any]:
    """The figures of all runs together."""
    found = [one for _, one in kills]
    next_s = [one.next_s for one in found if one.next_s is not None]
    back_s = [one.back_s for one in found if one.back_s is not None]
    return {
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": " ".join(["python", *sys.argv]),
        "minutes": round(seconds / 60, 1),
        "kills": len(found),
        "misses_on_a_busy_machine": sum(len(one.discarded) for one in found),
        "passed": sum(not one.fault for one in found),
        "deadline_s": round(median(one.deadline_s for one in found), 3),
        "next_decision_s": _figures(next_s, 3),
        "back_s": _figures(back_s, 3),
        "most_tokens_lost_in_rounds": max(one.lost for one in found) / (SYNC_EVERY * TOKENS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=10, help="runs of each cell; default 10")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--sample", action="store_true", help="one run of each cell, no files")
    parser.add_argument("--only", default="", help="cells whose name has this pattern")
    parser.add_argument("--name", help="of the files in results, here of chosen cells too")
    parser.add_argument("--dir", type=Path, help="where runs are kept while they last")
    parser.add_argument("--keep", action="store_true", help="keep the directories of failed runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(options.first_seed, options.first_seed + (1 if options.sample else options.seeds))
    kills: list[tuple[Cell, Kill]] = []
    began = time.monotonic()
    for number, cell in enumerate(one for one in cells() if re.search(options.only, str(one))):
        for seed in seeds:
            found = examined(cell, seed, options.dir, keep=options.keep)
            kills.append((cell, found))
            if found.fault:
                print(f"{cell}, seed {found.seed}: {found.fault}", file=sys.stderr, flush=True)
        if number % 10 == 9:
            print(f"{len(kills)} kills in {time.monotonic() - began:.0f} s", file=sys.stderr)
    figures = summary(kills, time.monotonic() - began)
    print(table(kills))
    print(json.dumps(figures, indent=2))
    is_whole = not (options.sample or options.only)
    name = options.name or ("crash_matrix" if is_whole else None)
    if name is not None:
        (RESULTS / f"{name}.json").write_text(
            json.dumps({**figures, "runs": [asdict(one) for _, one in kills]}, indent=1)
        )
        (RESULTS / f"{name}.md").write_text(report(figures, kills))
    sys.exit(any(one.fault for _, one in kills))


def report(figures: dict[str, Any], kills: Sequence[tuple[Cell, Kill]]) -> str:
    """The page of results."""
    lines = [f"- {name.replace('_', ' ')}: {value}" for name, value in figures.items()]
    missed = [
        f"- {one.cell}, seed {one.seed}: {what}" for _, one in kills for what in one.discarded
    ]
    if missed:
        head = f"Repeated, as the machine was slowed down more than {BUSY} times:"
        missed = ["", head, "", *missed]
    faults = [f"- {one.cell}, seed {one.seed}: {one.fault}" for _, one in kills if one.fault]
    faults = ["", "Not passed:", "", *faults] if faults else []
    parts = ["# Crash matrix", "", *lines, "", table(kills), *faults, *missed, ""]
    return "\n".join(parts)


if __name__ == "__main__":
    main()
