"""What channel 2 costs: memory and time of a Jensen-Shannon divergence over a large vocabulary.

    python benchmarks/composer_losses.py [--tokens 2048] [--vocabulary 150000] [--hidden 128]

One sequence, forward and backward, fp32, one thread, each contender in a process of its own. The
memory is the process's peak over what it had before it made the inputs, so the inputs and the
gradient count; as copies, it is in units of one (T, V) tensor. Time is CPU time, so that other work
on the machine hardly shows. A contender for which the machine has not enough memory free runs on
the largest half, quarter … of the sequence that fits; copies and time per token tell.

From logits: the formula written out, TRL's ``GKDTrainer.generalized_jsd_loss`` and ours, also
where one token in eight counts, as in a turn that went wrong. From hidden states: the formula on
projected logits, TRL's ``ChunkedDivergenceFunction`` and ours.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measured
import process_meters
import torch
from torch import Tensor

from diloco_cloud.composer import fused_jsd_loss, generalized_jsd_loss

BETA = 0.5
#: Copies of (T, V) that a contender may need, generously; for the decision where it fits.
NEEDS = {"formula": 16, "trl": 18, "ours": 6, "ours, 1 in 8": 6}
NEEDS |= {"formula from hidden": 16, "trl from hidden": 4, "ours from hidden": 2}
HEADER = ["", "tokens", "peak", "copies", "CPU time per token", "memory to formula", "time to TRL"]


def formula(student: Tensor, teacher: Tensor) -> Tensor:
    """Agarwal et al., Eq. 1, as it is written."""
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)
    m = (BETA * q.exp() + (1 - BETA) * p.exp()).log()
    each = BETA * q.exp() * (q - m) + (1 - BETA) * p.exp() * (p - m)
    return each.sum(-1).mean()


def trl(student: Tensor, teacher: Tensor) -> Tensor:
    from trl.experimental.gkd import GKDTrainer

    # With labels for every token: without, it divides by the number of sequences.
    labels = torch.zeros(student.shape[:-1], dtype=torch.long)
    loss: Tensor = GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta=BETA)
    return loss


def ours(student: Tensor, teacher: Tensor) -> Tensor:
    return generalized_jsd_loss(student, teacher, beta=BETA, reduction="mean")


def ours_on_few(student: Tensor, teacher: Tensor) -> Tensor:
    labels = torch.full(student.shape[:-1], -100)
    labels[:, ::8] = 0
    return generalized_jsd_loss(student, teacher, labels, beta=BETA)


def trl_from_hidden(student: Tensor, teacher: Tensor, head: torch.nn.Linear) -> Tensor:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    fixed = head.weight.detach()
    per_token, _ = ChunkedDivergenceFunction.apply(
        student[0], head.weight, None, teacher[0], fixed, None, BETA, 1.0
    )
    loss: Tensor = per_token.mean()
    return loss


LOGITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "formula": formula,
    "trl": trl,
    "ours": ours,
    "ours, 1 in 8": ours_on_few,
}
HIDDEN: dict[str, Callable[[Tensor, Tensor, torch.nn.Linear], Tensor]] = {
    "formula from hidden": lambda s, t, head: formula(head(s), head(t).detach()),
    "trl from hidden": trl_from_hidden,
    "ours from hidden": lambda s, t, head: fused_jsd_loss(s, t, head, beta=BETA),
}


def run_one(name: str, tokens: int, vocabulary: int, hidden: int) -> dict[str, float]:
    """Forward and backward once, in this process: peak bytes, CPU seconds, loss."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = vocabulary if name in LOGITS else hidden
    head = torch.nn.Linear(hidden, vocabulary, bias=False) if name in HIDDEN else None
    small = torch.randn(1, 1, width, requires_grad=True)
    _call(name, small, small.detach(), head).backward()  # imports, and the pools of libraries
    if head is not None:
        head.weight.grad = None
    before = resident_kib()
    student, teacher = torch.randn(1, tokens, width), torch.randn(1, tokens, width)
    student.requires_grad_(True)
    began = process_meters.own_cpu_s()
    loss = _call(name, student, teacher, head)
    loss.backward()
    seconds = process_meters.own_cpu_s() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"peak": peak * 1024, "seconds": seconds, "loss": loss.item()}


def _call(name: str, student: Tensor, teacher: Tensor, head: torch.nn.Linear | None) -> Tensor:
    if head is None:
        return LOGITS[name](student, teacher)
    return HIDDEN[name](student, teacher, head)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One contender in a process of its own, on as many tokens as there is memory for."""
    tokens = options.tokens
    while NEEDS[name] * tokens * options.vocabulary * 4 > 0.8 * available_bytes():
        tokens //= 2
    size = ["--tokens", tokens, "--vocabulary", options.vocabulary, "--hidden", options.hidden]
    command = [sys.executable, __file__, "--contender", name, *map(str, size)]
    # Large blocks straight from the system and back to it: a peak is then what was in use.
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "1048576",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    copies = found["peak"] / (4 * tokens * options.vocabulary)
    return {"name": name, "tokens": tokens, "copies": copies, **found}


def resident_kib() -> int:
    """What this process holds now; its greatest so far would hide what the first call took."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell how much memory is available")


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """One line for each contender, with ratios to the formula and to TRL of the same kind."""
    kinds = [[r for r in results if (r["name"] in HIDDEN) == hidden] for hidden in (False, True)]
    return [_row(one, {r["name"].split()[0]: r for r in kind}) for kind in kinds for one in kind]


def _row(one: dict[str, Any], kind: dict[str, dict[str, Any]]) -> list[str]:
    each = 1e3 * one["seconds"] / one["tokens"]
    other = 1e3 * kind["trl"]["seconds"] / kind["trl"]["tokens"]
    return [
        one["name"],
        str(one["tokens"]),
        f"{one['peak'] / 1e9:.2f} GB",
        f"{one['copies']:.1f}",
        f"{each:.2f} ms",
        f"{one['copies'] / kind['formula']['copies']:.2f}",
        f"{each / other:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--contender", choices=list(NEEDS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        size = (options.tokens, options.vocabulary, options.hidden)
        print(json.dumps(run_one(options.contender, *size)))
        return
    where = measured.machine()
    results = [measure(name, options) for name in NEEDS]
    text = (
        f"V = {options.vocabulary}, one sequence, fp32, β = {BETA}, forward and backward on one "
        f"thread; hidden size {options.hidden} where hidden states are projected. Memory counts "
        "the inputs and the gradient; one copy is one (T, V) tensor. Ratios are of copies and of "
        "time per token, within the kind.\n\n" + measured.table(HEADER, rows(results))
    )
    measured.write(
        "composer_losses", "Memory and time of channel 2", where, text, {"results": results}
    )


if __name__ == "__main__":
    main()
