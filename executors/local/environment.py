"""What a replica on a shared machine needs in its environment, and what it must not inherit."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

#: One thread each: replicas share the machine, and each library would start a thread per core.
_THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
#: A replica is a world of its own; these describe the one its launcher may be part of.
_TORCHRUN_VARIABLES: Final = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)


def replica_environment(
    inherited: Mapping[str, str],
    added: Mapping[str, str],
    *,
    rank: int,
    cpu_threads: int,
    devices: Sequence[str],
) -> dict[str, str]:
    """The whole environment of one replica.

    Args:
        inherited: the launcher's environment.
        added: variables of this replica; they override everything else.
        rank: picks the device.
        cpu_threads: for the numerical libraries, unless ``inherited`` or ``added`` say otherwise.
        devices: names for ``CUDA_VISIBLE_DEVICES``; empty leaves the variable alone.
    """
    defaults = dict.fromkeys(_THREAD_VARIABLES, str(cpu_threads))
    defaults["PYTHONUNBUFFERED"] = "1"  # a log is followed while it is written
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in _TORCHRUN_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    dealt = {"CUDA_VISIBLE_DEVICES": devices[rank % len(devices)]} if devices else {}
    return {**defaults, **kept, **dealt, **added}


def cuda_devices() -> tuple[str, ...]:
    """Names of the CUDA devices this process may use, found without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return _installed_devices()
    names = tuple(name.strip() for name in visible.split(","))
    # CUDA itself stops at the first name that is no device; "", "-1" and "NoDevFiles" hide all.
    return tuple(name for name in names if name and name not in ("-1", "NoDevFiles"))


@functools.cache
def _installed_devices() -> tuple[str, ...]:
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    count = sum(line.startswith("GPU ") for line in listing.splitlines())
    return tuple(map(str, range(count)))
