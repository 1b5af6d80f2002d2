"""Four replicas train one model on this machine, meeting only in a directory; one trains alone.

    python examples/demo.py

Both runs see the standard library's sources and take the same number of steps from the same initial
weights. The program follows them, compares the merged model with the lone replica's on text neither
has seen, checks that all replicas hold the same parameters, and draws the curves. It exits with 1
if the replicas differ, or if merging did not help.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo_figures import RunFigures, collect_figures, held_out
from demo_follow import follow
from rich.console import Console
from rich.table import Table

from diloco_cloud import Run, RunSpec, launch
from diloco_cloud.errors import DilocoError
from diloco_cloud.run import new_run_id

REPLICAS = 4
SYNC_EVERY = 50
ROUNDS = 60
#: Seconds to wait for a cancelled run: its replicas are killed after 10.
STOP_S = 15
#: Small enough for two cores, large enough to learn what Python looks like.
TRAINER_ARGS: dict[str, Any] = {
    "tokenizer": "bpe",
    "vocabulary_size": 1024,
    "hidden_size": 96,
    "layers": 2,
    "heads": 4,
    "sequence_length": 64,
    "batch_size": 4,
    "learning_rate": 3e-3,
    "validation_sequences": 128,
}


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--output", type=Path, default=Path("demo"), help="directory (default demo)"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    parser.add_argument("--sync-every", type=int, default=SYNC_EVERY, help=f"default {SYNC_EVERY}")
    args = parser.parse_args()
    console = Console()
    began = time.monotonic()
    run_id = new_run_id("demo")
    specs = make_specs(run_id, rounds=args.rounds, sync_every=args.sync_every)
    store = (args.output / "runs").resolve()
    store.mkdir(parents=True, exist_ok=True)
    announce(console, specs[0], store)
    runs: list[Run] = []
    try:
        for spec in specs:
            runs.append(launch(spec, store))
        follow(console, runs)
    except BaseException:
        stop(console, runs)
        raise
    console.print("Evaluating both models on held-out text…")
    windows = held_out(specs[0])
    merged, lone = (collect_figures(run, args.output / run.run_id, windows) for run in runs)
    console.print(quality(merged, lone))
    console.print(traffic(merged))
    plot(console, merged, lone, args.output / f"{run_id}.png")
    console.print(f"Took {time.monotonic() - began:.0f} s.")
    return verdict(console, merged, lone)


def stop(console: Console, runs: Sequence[Run]) -> None:
    """Leave nothing running behind."""
    for run in runs:
        run.cancel()
    for run in runs:
        run.wait(timeout=STOP_S)
    if runs:
        console.print("Cancelled both runs." if len(runs) == 2 else "Cancelled the run.")


def make_specs(run_id: str, *, rounds: int, sync_every: int) -> tuple[RunSpec, RunSpec]:
    """The merged run, and the same for a replica alone.

    For so few rounds plain averaging (an outer learning rate of 1 without momentum) is the best
    outer step; for one replica it makes the outer loop the identity, so that one trains as if there
    were none, and on all of the training text instead of a shard.
    """
    common: dict[str, Any] = {
        "trainer_args": TRAINER_ARGS,
        "sync_every": sync_every,
        "rounds": rounds,
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "nesterov": False,
        # Everybody in every round with all steps, however busy this machine: each run of the demo
        # ends with the same model.
        "grace": 60.0,
    }
    return (
        RunSpec(run_id=run_id, replicas=REPLICAS, **common),
        RunSpec(run_id=f"{run_id}-lone", replicas=1, **common),
    )


def announce(console: Console, spec: RunSpec, store: Path) -> None:
    """Say what is about to happen, and how to watch it from elsewhere."""
    steps = spec.sync_every * (spec.rounds or 0)
    console.print(
        f"[bold]{spec.replicas} replicas, {steps} steps each, merged every {spec.sync_every}; "
        "and one replica alone for as many steps.[/]",
        soft_wrap=True,
    )
    where = f"--store {shlex.quote(str(store))}"
    console.print("Follow from another terminal:")
    for command in (
        f"ls {where}",
        f"status {spec.run_id} {where}",
        f"logs -f {spec.run_id} {where}",
    ):
        console.print(f"  {program()} {command}", soft_wrap=True, highlight=False)


def program() -> str:
    """What to type for diloco-cloud; it need not be on PATH beside this interpreter."""
    if shutil.which("diloco-cloud"):
        return "diloco-cloud"
    return shlex.quote(str(Path(sys.executable).with_name("diloco-cloud")))


def quality(merged: RunFigures, lone: RunFigures) -> Table:
    """What merging gained."""
    spec = merged.spec
    steps = spec.sync_every * (spec.rounds or 0)
    table = Table(title=f"{merged.parameters:,} parameters, {steps} steps per replica")
    table.add_column("")
    table.add_column(f"{spec.replicas} replicas, merged", justify="right")
    table.add_column("1 replica alone", justify="right")
    table.add_row("held-out loss (nats/token)", f"{merged.loss:.3f}", f"{lone.loss:.3f}")
    table.add_row("held-out perplexity", f"{merged.perplexity:.1f}", f"{lone.perplexity:.1f}")
    table.add_row("tokens trained on", f"{merged.tokens:,}", f"{lone.tokens:,}")
    return table


def traffic(merged: RunFigures) -> Table:
    """What merging cost, against a gradient all-reduce at every step."""
    spec = merged.spec
    steps = spec.sync_every * (spec.rounds or 0)
    n, size = spec.replicas, 4 * merged.parameters
    # A ring passes each gradient element on 2(N-1)/N times, whoever sends it.
    synchronous = steps * 2 * (n - 1) / n * size
    sent, received = max(merged.bytes_sent), max(merged.bytes_received)
    table = Table(
        title="Exchanged per replica",
        caption="¹ ring all-reduce of fp32 gradients: 2(N-1)/N x S x steps\n"
        f"with N = {n}, S = {megabytes(size)}, {steps} steps",
    )
    table.add_column("")
    table.add_column("sent", justify="right")
    table.add_column("received", justify="right")
    table.add_row(
        f"merged every {spec.sync_every} steps (measured)", megabytes(sent), megabytes(received)
    )
    table.add_row(
        "synchronous data parallel¹ (computed)", megabytes(synchronous), megabytes(synchronous)
    )
    table.add_row("less by", f"{synchronous / sent:.0f}x", f"{synchronous / received:.0f}x")
    table.add_section()
    blocked = sum(merged.seconds_blocked) / n
    table.add_row("seconds blocked, peers' delays included", f"{blocked:.1f}", "")
    return table


def megabytes(count: float) -> str:
    """Bytes in decimal megabytes."""
    return f"{count / 1e6:,.1f} MB"


def plot(console: Console, merged: RunFigures, lone: RunFigures, path: Path) -> None:
    """Draw the curves, where matplotlib is installed."""
    try:
        from demo_plot import draw
    except ImportError:
        console.print("No picture: pip install 'diloco-cloud[plot]' to have one.")
        return
    draw(merged, lone, path)
    console.print(f"Picture: {path}", soft_wrap=True, highlight=False)


def verdict(console: Console, merged: RunFigures, lone: RunFigures) -> int:
    """Say whether the demo showed what it is for; returns the exit code."""
    better = merged.loss < lone.loss
    gain = 1 - merged.perplexity / lone.perplexity
    if better:
        console.print(f"[green]✓[/] merging lowered held-out perplexity by {gain:.0%}")
    else:
        console.print("[red]✗[/] the merged model is no better than the lone replica's")
    digests = set(merged.digests)
    same = len(digests) == 1 and None not in digests
    if same:
        console.print(
            f"[green]✓[/] all {len(merged.digests)} replicas hold the same parameters: "
            f"{merged.digests[0]}",
            soft_wrap=True,
            highlight=False,
        )
    else:
        console.print("[red]✗[/] the replicas hold different parameters:")
        for rank, digest in enumerate(merged.digests):
            console.print(f"    replica {rank}: {digest}")
    return 0 if same and better else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DilocoError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
