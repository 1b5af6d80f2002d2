"""Warns of misspelt variables: one that nobody reads changes nothing, and nobody would tell."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from diloco_cloud.cli import output

_PREFIX = "DILOCO_"
#: How alike two names are of which one is taken for the other. A trainer may read variables of its
#: own, and they are not to be complained of.
_ALIKE = 0.8


def warn_of_misspelt(environ: Mapping[str, str]) -> None:
    """Tell of each ``DILOCO_*`` variable that nobody reads and that resembles one that is read."""
    given = [name for name in environ if name.startswith(_PREFIX)]
    if not given:
        return
    from diloco_cloud.run.config import known_variables

    known = known_variables()
    by_rest = {name.removeprefix(_PREFIX): name for name in known}
    for name in sorted(set(given).difference(known)):
        rest = name.removeprefix(_PREFIX)
        if near := difflib.get_close_matches(rest, by_rest, n=1, cutoff=_ALIKE):
            output.note(f"Warning: nobody reads {name}; did you mean {by_rest[near[0]]}?")
