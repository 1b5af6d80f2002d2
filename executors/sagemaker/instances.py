"""Which SageMaker instance brings which accelerator."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Final

from diloco_cloud.errors import ConfigError

#: The smallest instance with so many of an accelerator, by the name people use for it.
GPUS: Final = {
    "T4": "ml.g4dn.xlarge",
    "T4:4": "ml.g4dn.12xlarge",
    "V100": "ml.p3.2xlarge",
    "V100:4": "ml.p3.8xlarge",
    "V100:8": "ml.p3.16xlarge",
    "A10G": "ml.g5.xlarge",
    "A10G:4": "ml.g5.12xlarge",
    "A10G:8": "ml.g5.48xlarge",
    "L4": "ml.g6.xlarge",
    "L4:4": "ml.g6.12xlarge",
    "L4:8": "ml.g6.48xlarge",
    "L40S": "ml.g6e.xlarge",
    "L40S:4": "ml.g6e.12xlarge",
    "L40S:8": "ml.g6e.48xlarge",
    "A100:8": "ml.p4d.24xlarge",
    "A100-80GB:8": "ml.p4de.24xlarge",
    "H100": "ml.p5.4xlarge",
    "H100:8": "ml.p5.48xlarge",
    "H200:8": "ml.p5en.48xlarge",
    "B200:8": "ml.p6-b200.48xlarge",
    "B300:8": "ml.p6-b300.48xlarge",
}
#: Alternatives that one job may name.
_MOST: Final = 5


def instance_types(wanted: str, known: Collection[str]) -> tuple[str, ...]:
    """The instance types that a setting asks for, in order of preference.

    Args:
        wanted: "ml.g5.2xlarge", "H100", "A10G:4", or several of them, separated by commas.
        known: every type that training jobs may run on.

    Raises:
        ConfigError: SageMaker has no such instance or accelerator.
    """
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    found = tuple(dict.fromkeys(_instance_type(name, known) for name in names))
    if not 1 <= len(found) <= _MOST:
        raise ConfigError(
            f"{wanted!r} names {len(found)} instance types",
            fix=f"Name one, or up to {_MOST} in order of preference.",
        )
    return found


def _instance_type(name: str, known: Collection[str]) -> str:
    found = GPUS.get(name.upper().removesuffix(":1"), name)
    if found in known:
        return found
    if name.startswith("ml."):
        near = difflib.get_close_matches(name, sorted(known), n=3)
        raise ConfigError(
            f"SageMaker trains on no {name!r}",
            fix=f"Did you mean {' or '.join(near)}?" if near else "Name an ml.… instance type.",
        )
    kind = name.upper().partition(":")[0]
    same = [gpu for gpu in GPUS if gpu.partition(":")[0].startswith(kind)]
    raise ConfigError(
        f"no SageMaker instance is known to have {name!r}",
        fix=f"Ask for {', '.join(same or GPUS)}, or for an instance type such as ml.g5.2xlarge.",
    )
