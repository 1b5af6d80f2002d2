"""What processes cost: CPU seconds and peak memory, as Linux counts them."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def own_cpu_s() -> float:
    """CPU seconds of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def cpu_s(pid: int | None) -> float:
    """CPU seconds of another process; 0 for none."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def machine_cpu_s() -> tuple[float, float]:
    """CPU seconds of the machine since it started: busy, and all there were."""
    times = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = times[3] + times[4]
    return (sum(times) - idle) * _TICK_S, sum(times) * _TICK_S


def reset_peak_memory() -> None:
    """Let the peak be looked for from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """The most bytes this process has had in memory since the peak was reset."""
    return _status("VmHWM")


def memory() -> int:
    """Bytes of this process in memory."""
    return _status("VmRSS")


def available_memory() -> int:
    """Bytes that the machine could give to new processes."""
    return _field(Path("/proc/meminfo"), "MemAvailable")


def _status(name: str) -> int:
    return _field(Path("/proc/self/status"), name)


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{path} does not tell {name}")
