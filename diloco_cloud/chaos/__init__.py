"""Rehearsing failure: storms of faults on a run of small replicas, and what became of it.

Nothing of the product depends on this room; it uses the product as anybody would.
"""

from __future__ import annotations

from typing import Final

from diloco_cloud import keys

#: Where the trainer of a rehearsal looks for the outer step to stop after, which nobody knows when
#: the run begins.
LAST_STEP: Final = f"{keys.TRAINER}last_step"
