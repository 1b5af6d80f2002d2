"""Launch a run from Python, follow it, read what it leaves: what the command line does, as code.

Two replicas train a small language model on the Python standard library's sources, on this
machine, in half a minute:

    python examples/driver.py

On other machines only two knobs change, the backend and a store that all of them reach:

    python examples/driver.py --backend modal --store s3://bucket/runs --replicas 4

The same from a terminal:

    diloco-cloud launch --replicas 2 --sync-every 10 --rounds 3 --set hidden_size=32 --set layers=2
"""

# ruff: noqa: T201 (a program prints; the library doesn't)

from __future__ import annotations

import argparse

from diloco_cloud import Run, RunSpec, launch
from diloco_cloud.run import new_run_id

# ---------------------------------------------------------------------------------------------
# Knobs of the command

parser = argparse.ArgumentParser(description="Launch a run from Python and follow it.")
parser.add_argument("--backend", default="local")  # where replicas run
parser.add_argument(
    "--store", default="runs"
)  # what they meet in: a directory, s3://, gs://, az://
parser.add_argument("--replicas", type=int, default=2)
parser.add_argument("--sync-every", type=int, default=10)  # inner steps between two exchanges (H)
parser.add_argument("--rounds", type=int, default=3)  # exchanges; 3 x 10 inner steps in all
knobs = parser.parse_args()

# ---------------------------------------------------------------------------------------------
# The run. Everything that replicas must agree on is in its spec, which is stored with the run.

spec = RunSpec(
    run_id=new_run_id("driver"),  # driver-x7k2p: also names the jobs at a provider
    backend=knobs.backend,
    replicas=knobs.replicas,
    sync_every=knobs.sync_every,
    rounds=knobs.rounds,
    outer_lr=0.7,  # of the outer SGD on averaged pseudo-gradients; the paper's value
    outer_momentum=0.9,  # Nesterov; likewise
    trainer="diloco_cloud.trainers.language_model:train",  # any train(*, manager, rank, …) does
    trainer_args={
        "hidden_size": 32,  # far too small to be good, large enough to learn something
        "layers": 2,
        "heads": 2,
        "sequence_length": 64,  # bytes: the default tokenizer is none
        "batch_size": 4,  # per replica
        "validation_sequences": 16,
    },
    timeout=600,  # seconds a replica may run
    join_timeout=300,  # to wait for all of them to start
    round_timeout=120,  # to wait for the others in a round
)

# ---------------------------------------------------------------------------------------------
# Launch and follow. Once it is launched, the run needs this process no longer: kill it, and
# Run.open(store, run_id) finds the run again from any machine that reaches the store.

launched = launch(spec, knobs.store)
print(f"launched {launched.run_id} in {launched.store_uri}")

run = Run.open(launched.store_uri, launched.run_id)  # as another process would
shown = None
for status in run.watch(interval=1.0):
    states = ", ".join(f"{view.rank} {view.phase or view.state}" for view in status.replicas)
    if (status.round, states) != shown:
        print(f"round {status.round or 0}: {states}")  # None until the first heartbeat
        shown = (status.round, states)

# ---------------------------------------------------------------------------------------------
# What it leaves

if status.state != "succeeded":
    for view in status.replicas:
        print(f"replica {view.rank}: {view.state} {view.error or ''}", *view.log_tail, sep="\n  ")
    raise SystemExit(f"{run.run_id} has {status.state}")

results = run.results()
print(f"all replicas hold the same parameters: {results.digest is not None} ({results.digest})")
for row in run.metrics():
    if row["rank"] == 0:
        print(f"round {row['round']}: loss {row['loss']:.3f}, {row['bytes_sent']:,} bytes sent")
print("rank 0's trainer returned:")
for name, value in results.returned[0].items():
    print(f"  {name}: {value}")
print(f"the model: {run.uri}/{results.model}")
