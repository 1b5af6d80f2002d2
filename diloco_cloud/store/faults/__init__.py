"""A store that misbehaves on purpose, the same way each time: for tests and rehearsals.

    store = open_store("faults+s3://bucket/runs?seed=7&throttled=0.1&lost_reply=0.05")

    faulty = FaultyStore(open_driver("s3://bucket/runs"), Faults(seed=7, throttled=0.1))
    store = RetryingStore(faulty)
    faulty.partition(); faulty.heal(); faulty.injected["throttled"]

The faults lie below the retries, so what is met and repeated is what a real run would meet.
"""

from __future__ import annotations

from diloco_cloud.store.faults.faulty import FaultyStore
from diloco_cloud.store.faults.settings import Faults

__all__ = ["Faults", "FaultyStore"]
