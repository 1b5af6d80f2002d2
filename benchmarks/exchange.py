"""How long N replicas need to average S bytes over an object store, against what is possible.

    python benchmarks/exchange.py --quick               under a minute
    python benchmarks/exchange.py                       about 8 minutes
    python benchmarks/exchange.py --cells 8x256 --stores 100 --modes sharded --reducers 4

Replicas are processes of their own; each may have a line of its own to a real S3 server, with a
rate each way and a round trip of 30 ms (``shaped_links.py``). In one run, side by side: ours in
every mode and codec; the design that others have (``reference_exchange.py``); and the limit, the
time in which as many bytes cross the same lines both ways at once and nothing else happens
(``bulk_transfer.py``). A round lasts from the moment all replicas are let go to the moment the
last one has its mean. After the last round, every replica's result is compared with a mean that
was found slowly.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import exchange_report
import measured
from exchange_cell import Cell, CellMeasurement, Scope
from exchange_results import Result, SlowMean
from exchange_stores import place_of, s3_server
from reference_exchange import REFERENCES

logger = logging.getLogger("exchange")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The exchange against the physical limit")
    add = parser.add_argument
    add("--cells", nargs="+", default=["4x64"], help="replicas x MiB, such as 8x256")
    add(
        "--stores",
        nargs="+",
        default=["directory", "200"],
        help="directory, s3, or Mbit/s of each replica's line to the S3 server",
    )
    add("--modes", nargs="*", default=["all-gather", "sharded"], help="of fp32")
    add("--reducers", type=int, nargs="*", default=[], help="numbers of volunteers, with fp32")
    add("--codecs", nargs="*", default=["bf16", "int8", "e3m0", "sparse"], help="beside fp32")
    add("--references", nargs="*", default=list(REFERENCES), choices=list(REFERENCES))
    add("--rounds", type=int, default=3, help="measured, after one that is not")
    add("--reference-rounds", type=int, default=1, help="measured, of each reference")
    add("--layers", type=int, default=11, help="of the model, of nine tensors each")
    add("--quick", action="store_true", help="2x8, one round, one layer, fewer references")
    add("--name", default="exchange", help="of the files in benchmarks/results")
    add("--chart", type=Path, help="draw the results here, as .svg or .png")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> Iterator[Result]:
    """All stores, all cells, all contenders."""
    cells = [Cell.parse(text) for text in arguments.cells]
    scope = Scope(
        tuple(arguments.modes),
        tuple(arguments.codecs),
        tuple(arguments.reducers),
        tuple(arguments.references),
        arguments.rounds,
        arguments.reference_rounds,
        arguments.layers,
    )
    means = SlowMean()
    with ExitStack() as stack:
        server = stack.enter_context(s3_server()) if set(arguments.stores) - {"directory"} else None
        for store in arguments.stores:
            for cell in cells:
                with place_of(store, cell.replicas, server) as place:
                    for found in CellMeasurement(cell, place, scope, means).results():
                        logger.info(
                            "%s %s: %s: %.2f s", found.store, cell, found.name, found.seconds
                        )
                        yield found


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logger.setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no server and no files behind
    arguments = parse_arguments()
    if arguments.quick:
        arguments.cells, arguments.rounds, arguments.layers = ["2x8"], 1, 1
        arguments.references = [name for name in REFERENCES if name != "reference"]
    where = measured.machine()
    results = list(measure(arguments))
    text = exchange_report.page(results, arguments.rounds, arguments.reference_rounds)
    values = {"results": [asdict(one) for one in results]}
    measured.write(arguments.name, "The exchange against the physical limit", where, text, values)
    if arguments.chart:
        from exchange_chart import draw

        draw(results, arguments.chart)
    if wrong := exchange_report.failures(results):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
