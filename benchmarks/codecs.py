"""What each codec costs and loses: bits per parameter, speed on one core, error.

    python benchmarks/codecs.py [--runs 15] [--chunk-mib 4]

Chunks are the size that a contribution has. Speed is fp32 input over the CPU time of one thread, so
that other work on the machine hardly shows; encoding with feedback is what a sparse contribution
takes: the residual is added, the sum encoded, and afterwards decoded and taken off. What is added
to a mean is decoded; whether all of it is finite, which is checked before, can cost less. Errors
are relative L2 norms over 4 Mi values, Gaussian and of Student's t with three degrees of freedom. A
sparse contribution is meant to leave most of the norm behind, for later.

A second table is of what travels after the contributions in a sharded round: the sums, encoded
once more.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import measured
import numpy as np
import torch

from diloco_cloud.exchange.codecs import codec_names, get_codec
from diloco_cloud.exchange.codecs.base import Codec
from diloco_cloud.exchange.codecs.feedback import Feedback

VALUES = 2**22
HEADER = [
    "codec",
    "bits",
    "bits, heavy",
    "ratio",
    "encode",
    "with feedback",
    "decode",
    "add",
    "check",
    "error",
    "error, heavy",
]
SUMS_HEADER = ["codec", "sums in", "mean", "mean, from its sum", "from one in the codec itself"]


def cpu_seconds(work: Callable[[], object], runs: int) -> float:
    """Median CPU time of this thread."""
    work()
    times = []
    for _ in range(runs):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return statistics.median(times)


def samples() -> dict[str, torch.Tensor]:
    """Values by what they are called in the table."""
    random = np.random.default_rng(0)
    return {
        "Gaussian": torch.from_numpy(random.standard_normal(VALUES).astype(np.float32)),
        "heavy-tailed": torch.from_numpy(random.standard_t(3, VALUES).astype(np.float32)),
    }


def speeds(codec: Codec, values: torch.Tensor, runs: int) -> list[float]:
    """GB/s of fp32: encode, encode with feedback, decode, add to a mean, look for NaN."""
    data = codec.encode(values)
    mean, feedback = codec.mean(len(values)), Feedback(len(values), codec.decay or 1.0)

    def with_feedback() -> None:
        feedback.settle(values, 0, codec, codec.encode(feedback.added_to(values, 0)))

    works: list[Callable[[], object]] = [
        lambda: codec.encode(values),
        with_feedback,
        lambda: codec.decode(data, len(values)),
        lambda: mean.add(data, 0.5),
        lambda: codec.all_finite(data, len(values)),
    ]
    return [4e-9 * len(values) / cpu_seconds(work, runs) for work in works]


def bits_and_error(codec: Codec, values: torch.Tensor, chunk: int) -> tuple[float, float]:
    """Bits per parameter, and relative error."""
    size, wrong = 0, 0.0
    for part in values.split(chunk):
        data = codec.encode(part)
        size += len(data)
        wrong += float((part - codec.decode(data, len(part))).double().square().sum())
    return 8 * size / len(values), (wrong / float(values.double().square().sum())) ** 0.5


def errors_of_sums(values: int, contributions: int = 8, cosine: float = 0.25) -> list[list[str]]:
    """Relative errors of a mean as it is, and as its sum travels, by codec."""
    random = np.random.default_rng(0)
    common, *own = (
        torch.from_numpy(random.standard_normal(values).astype(np.float32))
        for _ in range(contributions + 1)
    )
    given = [cosine**0.5 * common + (1 - cosine) ** 0.5 * one for one in own]
    exact = torch.stack(given).double().mean(0)
    rows = []
    for name in codec_names():
        codec = get_codec(name)
        if not codec.sums:
            continue
        mean = codec.mean(values)
        for one in given:
            mean.add(codec.encode(one), 1.0)
        means = [mean.result()]
        for carrier in map(get_codec, (codec.sums.replace("raw", "fp32"), name)):
            means.append(carrier.decode(carrier.encode(means[0]), values))
        errors = [float((one - exact).norm() / exact.norm()) for one in means]
        rows.append([name, codec.sums, *(f"{error:.4f}" for error in errors)])
    return rows


def measure(runs: int, chunk: int) -> list[list[str]]:
    """Rows of the table: one for each codec."""
    data = samples()
    rows = []
    for name in codec_names():
        codec = get_codec(name)
        rates = speeds(codec, data["Gaussian"][:chunk].clone(), runs)
        (bits, error), (heavy_bits, heavy_error) = (
            bits_and_error(codec, values, chunk) for values in data.values()
        )
        sizes = [f"{bits:.4g}", f"{heavy_bits:.4g}", f"{32 / bits:.3g}"]
        errors = [f"{error:.4f}", f"{heavy_error:.4f}"]
        rows.append([name, *sizes, *(f"{rate:.1f}" for rate in rates), *errors])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Size, speed and error of the codecs")
    parser.add_argument("--runs", type=int, default=15, help="of each measurement; default 15")
    parser.add_argument("--chunk-mib", type=int, default=4, help="fp32 MiB per chunk; default 4")
    arguments = parser.parse_args()
    where = measured.machine()
    torch.set_num_threads(1)
    rows = measure(arguments.runs, arguments.chunk_mib * 2**18)
    sums = errors_of_sums(2**20)
    measured.write(
        "codecs",
        "Size, speed and error of the codecs",
        where,
        f"""
torch {torch.__version__}, numpy {np.__version__}. GB/s of fp32 per second of one thread's CPU time.

{measured.table(HEADER, rows)}

Errors of the mean of eight contributions, Gaussian with cosines of 0.25: as it is, with its sum
encoded as the codec says, and in the codec itself.

{measured.table(SUMS_HEADER, sums)}
""",
        {"codecs": [dict(zip(HEADER, row, strict=True)) for row in rows], "sums": sums},
    )


if __name__ == "__main__":
    main()
