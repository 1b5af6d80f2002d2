"""One process, one life: two that believe to be the same one would count as one replica.

It happens without anybody's mistake: providers restart a container that died, or that they could no
longer see, with the environment it had. The later process then is the rank's next life, and the
earlier one, should it still run, finds that it has been taken over from.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import socket

from diloco_cloud import keys
from diloco_cloud.errors import AlreadyExistsError
from diloco_cloud.replica.identity import Identity
from diloco_cloud.store.base import ObjectStore


def claim_life(store: ObjectStore, identity: Identity) -> Identity:
    """The life that this process is: the one it was started as, or the first free one after it.

    Args:
        store: the run's prefix.
        identity: what its environment says.
    """
    who = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        # The store compares bytes to tell a lost reply from a lost race.
        "nonce": secrets.token_hex(16),
    }
    while True:
        try:
            store.create(keys.claim(identity.rank, identity.attempt), json.dumps(who).encode())
            return identity
        except AlreadyExistsError:
            identity = dataclasses.replace(identity, attempt=identity.attempt + 1)
