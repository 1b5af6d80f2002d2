"""What channel 2 costs: memory and time of a Jensen-Shannon divergence over a large vocabulary.

    python benchmarks/composer_losses.py [--tokens 2048] [--vocabulary 150000] [--hidden 128]

One sequence, forward and backward, fp32, one thread.

**Memory** is counted: the most bytes of tensors that are alive at once, inputs and gradients
included. The formulas need more than many machines have; they are counted on fake tensors, which
have shapes and no contents, and so at the full length. How true the count is shows beside it: the
growth of a process's resident memory in a real pass, of the full length where that fits
(``--usable``), else of a quarter and of half of it. Every real pass has a process of its own, the
first to be killed should memory run out.

**Time** is CPU time, so that other work on the machine hardly shows, and it is compared within one
process: the contenders of a kind take turns, and what counts is the ratio in each turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from typing import Any, Final

import measured
import process_meters
import torch
from composer_contenders import BETA, CONTENDERS, KINDS, Contender, Shape
from composer_memory import counted_peak, first_to_be_killed, measured_peak

#: The formulas from logits are timed on fewer tokens, which all contenders have memory for.
SHORT: Final = 4
TITLES: Final = {
    "logits": "From logits",
    "hidden": "From hidden states, the output head included",
    "trainer": "In the trainer, both passes through a model included",
}


def memory_of(number: int, shape: Shape) -> dict[str, Any]:
    """One contender's real pass in this process."""
    prepare = CONTENDERS[number].prepare
    # Imports, and the pools of libraries.
    prepare(Shape(1, shape.vocabulary, shape.hidden))().backward()
    with first_to_be_killed():
        return asdict(measured_peak(lambda: prepare(shape)))


def count_of(number: int, shape: Shape) -> dict[str, Any]:
    """One contender's pass by its shapes."""
    prepare = CONTENDERS[number].prepare
    return {"counted": counted_peak(lambda: prepare(shape))}


def times_of(numbers: list[int], shape: Shape, repeats: int) -> list[list[float]]:
    """CPU seconds of each contender in each turn, all in this process."""
    times: list[list[float]] = [[] for _ in numbers]
    for number in numbers:
        CONTENDERS[number].prepare(Shape(1, shape.vocabulary, shape.hidden))().backward()
    for _ in range(repeats):
        for found, number in zip(times, numbers, strict=True):
            compute = CONTENDERS[number].prepare(shape)
            began = process_meters.own_cpu_s()
            compute().backward()
            found.append(process_meters.own_cpu_s() - began)
            del compute  # or the next one's inputs come on top
    return times


def child(part: str, numbers: list[int], shape: Shape, repeats: int = 1) -> Any:
    """Do a part in a process of its own."""
    task = json.dumps({"part": part, "numbers": numbers, "repeats": repeats, **asdict(shape)})
    # Large blocks straight from the system and back to it: a peak is then what was in use.
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "1048576",
        "OMP_NUM_THREADS": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    done = subprocess.run(
        [sys.executable, __file__, "--child", task],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def run_child(task: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = Shape(task["tokens"], task["vocabulary"], task["hidden"])
    if task["part"] == "time":
        return times_of(task["numbers"], shape, task["repeats"])
    (number,) = task["numbers"]
    return {"count": count_of, "memory": memory_of}[task["part"]](number, shape)


def measure_memory(number: int, shape: Shape, usable: float) -> dict[str, Any]:
    """The count at the full length, and real passes as long as there is memory for."""
    one = CONTENDERS[number]
    lengths = [shape.tokens]
    counted = None
    if one.plain:
        counted = child("count", [number], shape)["counted"]
        if counted > usable * process_meters.available_memory():
            lengths = [shape.tokens // 4, shape.tokens // 2]
    passes = []
    for tokens in lengths:
        part = Shape(tokens, shape.vocabulary, shape.hidden)
        passes.append({"tokens": tokens, **child("memory", [number], part)})
        print(one.kind, one.name, passes[-1], flush=True)
    return {"counted": counted or passes[-1]["counted"], "passes": passes}


def measure_times(kind: str, shape: Shape, repeats: int) -> dict[str, Any]:
    """Of a kind's contenders: all of them on short sequences from logits, else ours and TRL's."""
    numbers = [
        number
        for number, one in enumerate(CONTENDERS)
        if one.kind == kind and (kind == "logits" or not one.plain)
    ]
    tokens = shape.tokens // SHORT if kind == "logits" else shape.tokens
    times = child("time", numbers, Shape(tokens, shape.vocabulary, shape.hidden), repeats)
    print(kind, times, flush=True)
    return {
        "tokens": tokens,
        "seconds": {CONTENDERS[n].name: found for n, found in zip(numbers, times, strict=True)},
    }


def kind_table(kind: str, memory: list[dict[str, Any]], times: dict[str, Any], copy: int) -> str:
    """A line for each contender of a kind."""
    own = [(one, m) for one, m in zip(CONTENDERS, memory, strict=True) if one.kind == kind]
    plain = next(m["counted"] for one, m in own if one.name == "formula")
    header = [
        *("", "memory", "copies of (T, V)", "to the formula", "resident to counted"),
        *("CPU time per token", "to TRL"),
    ]
    rows = [
        [
            one.name,
            f"{m['counted'] / 1e9:.2f} GB",
            f"{m['counted'] / copy:.2f}",
            f"{m['counted'] / plain:.3f}",
            _residence(m["passes"]),
            *_time(one, times),
        ]
        for one, m in own
    ]
    return f"## {TITLES[kind]}\n\n{measured.table(header, rows)}"


def _residence(passes: list[dict[str, Any]]) -> str:
    """How real passes compare with the count of the same length."""
    return ", ".join(f"{p['resident'] / p['counted']:.2f} (T = {p['tokens']})" for p in passes)


def _time(one: Contender, times: dict[str, Any]) -> tuple[str, str]:
    seconds = times["seconds"].get(one.name)
    if seconds is None:
        return "", ""
    each = f"{1e3 * statistics.median(seconds) / times['tokens']:.2f} ms"
    ratios = [mine / other for mine, other in zip(seconds, times["seconds"]["TRL"], strict=True)]
    if one.name == "TRL":
        return each, "1"
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return each, f"{statistics.median(ratios):.2f} ({spread})"


def verdict(memory: list[dict[str, Any]], times: dict[str, dict[str, Any]]) -> str:
    """The two demands, in the trainer's own code path."""
    own = {one.name: m for one, m in zip(CONTENDERS, memory, strict=True) if one.kind == "trainer"}
    share = own["ours"]["counted"] / own["formula"]["counted"]
    seconds = times["trainer"]["seconds"]
    slower = statistics.median(m / o for m, o in zip(seconds["ours"], seconds["TRL"], strict=True))
    memory_word, time_word = ("holds" if ok else "FAILS" for ok in (share <= 0.5, slower <= 1.1))
    return (
        f"In the trainer: at most half of the formula's memory **{memory_word}** ({share:.3f}); "
        f"not slower than TRL's kernel by more than 10 % **{time_word}** (it takes {slower:.2f} of "
        "the time)."
    )


def page(
    options: argparse.Namespace, memory: list[dict[str, Any]], times: dict[str, dict[str, Any]]
) -> str:
    copy = 4 * options.tokens * options.vocabulary
    text = (
        f"V = {options.vocabulary}, T = {options.tokens}, one sequence, fp32, β = {BETA}, forward "
        f"and backward on one thread, hidden size {options.hidden}. Memory is the most that is "
        "alive in tensors at once, inputs and gradients included, counted; a copy is "
        f"{copy / 1e9:.2f} GB. Beside it, what a process's resident memory grew by in a real pass, "
        "in units of the count at the same length: the formulas' count is of shapes alone at the "
        f"full length. Time is the median of {options.repeats} turns in one process; the ratio to "
        "TRL is of the same turn, with its range. From logits, T is "
        f"{times['logits']['tokens']} for the time. TRL's kernel is torch operators on a CPU; its "
        "Triton form for GPUs is not measured."
    )
    tables = [kind_table(kind, memory, times[kind], copy) for kind in KINDS]
    return "\n\n".join([text, verdict(memory, times), *tables])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3, help="turns of the timing")
    parser.add_argument(
        "--usable", type=float, default=0.85, help="part of the free memory that a pass may take"
    )
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_child(options.child)))
        return
    where = measured.machine()
    shape = Shape(options.tokens, options.vocabulary, options.hidden)
    memory = [measure_memory(number, shape, options.usable) for number in range(len(CONTENDERS))]
    times = {kind: measure_times(kind, shape, options.repeats) for kind in KINDS}
    values = {
        "memory": [
            {"kind": one.kind, "name": one.name, **found}
            for one, found in zip(CONTENDERS, memory, strict=True)
        ],
        "times": times,
    }
    text = page(options, memory, times)
    measured.write("composer_losses", "Memory and time of channel 2", where, text, values)


if __name__ == "__main__":
    main()
