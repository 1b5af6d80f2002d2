"""What a Modal function runs on, checked as far as that can be done without asking Modal."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Final

from diloco_cloud.errors import ConfigError

#: GPUs that Modal has had by the time of this version; Modal itself decides about other names.
KNOWN_GPUS: Final = (
    *("T4", "L4", "A10", "A10G", "L40S", "A100", "A100-40GB", "A100-80GB", "RTX-PRO-6000"),
    *("H100", "H100!", "H200", "B200", "B200+", "B300", "ANY"),
)
MOST_GPUS: Final = 8
CLOUDS: Final = ("aws", "gcp", "oci", "azure", "auto")

_GPU = re.compile(r"([A-Za-z0-9][A-Za-z0-9+!-]*)(?::(\d+))?")


def parse_gpus(gpu: str | Sequence[str] | None) -> tuple[str, ...]:
    """GPUs in order of preference: "H100", "H100:8", "H100,A100-80GB:2" or a list of such.

    Raises:
        ConfigError: a name or a number that Modal would refuse.
    """
    if gpu is None:
        return ()
    texts = gpu.split(",") if isinstance(gpu, str) else list(gpu)
    return tuple(_check_gpu(text) for text in texts)


def _check_gpu(text: object) -> str:
    match = _GPU.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(
            f"gpu {text!r} is no GPU of Modal's",
            fix='Write "H100", "H100:8", or several in order of preference: "H100,A100-80GB".',
        )
    name, count = match[1].upper(), int(match[2] or 1)
    if not 1 <= count <= MOST_GPUS:
        raise ConfigError(
            f"gpu {text!r} asks for {count} GPUs in one container",
            fix=f"Modal has 1 to {MOST_GPUS}; each replica has a container of its own.",
        )
    if name not in KNOWN_GPUS:
        near = difflib.get_close_matches(name, KNOWN_GPUS, n=1, cutoff=0.5)
        if near:
            raise ConfigError(
                f"Modal has no GPU {match[1]!r}",
                fix=f"Did you mean {near[0]!r}? Others: {', '.join(KNOWN_GPUS)}.",
            )
    return name if match[2] is None else f"{name}:{count}"


def parse_regions(region: str | Sequence[str] | None) -> tuple[str, ...]:
    """Regions from "us-east", "us-east,eu-west" or a list.

    Raises:
        ConfigError: something else.
    """
    if region is None:
        return ()
    names = region.split(",") if isinstance(region, str) else list(region)
    if not all(isinstance(name, str) and name.strip() for name in names):
        raise ConfigError(
            f"region is {region!r}", fix='Write "us-east", or several: "us-east,eu-west".'
        )
    return tuple(name.strip() for name in names)


def check_cloud(cloud: str | None) -> str | None:
    """``cloud`` if Modal has it.

    Raises:
        ConfigError: it has not.
    """
    if cloud is not None and cloud not in CLOUDS:
        raise ConfigError(f"cloud is {cloud!r}", fix=f"Modal has {', '.join(CLOUDS)}.")
    return cloud
