"""Writes down what a benchmark measured: a JSON file for programs, a page for people."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Where and when; the load is that of the minute before, by others on the machine."""
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 1),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def write(
    name: str, title: str, where: Mapping[str, Any], text: str, values: Mapping[str, Any]
) -> None:
    """Write ``results/<name>.json`` and ``.md``, and print the page.

    Args:
        name: of the files.
        title: of the page.
        where: what :func:`machine` said before the measurement.
        text: the page's body.
        values: everything that was measured.
    """
    place = (
        f"`{where['command']}`, {where['date']}, {where['platform']}, {where['cores']} cores of "
        f"{where['cpu']}, Python {where['python']}; load {where['load_before']} before it, "
        f"priority {where['nice']}."
    )
    page = f"# {title}\n\n{place}\n\n{text.strip()}\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(page)
    document = {"where": dict(where), **values}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(page)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
