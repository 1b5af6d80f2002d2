"""Run ids, unique without coordination: ``<name>-<5 random characters>``."""

from __future__ import annotations

import base64
import hashlib
import random
import re

from diloco_cloud.errors import ConfigError

#: No vowels, so no words; no 0, 1, l: ids are read aloud and typed.
ALPHABET = "bcdfghjkmnpqrstvwxz2456789"
SUFFIX_LENGTH = 5
DEFAULT_NAME = "diloco"

#: Characters that tell runs of one id apart, in stores that know nothing of each other.
_MARK_LENGTH = 5

_NAME = re.compile(r"[a-z][a-z0-9-]{0,33}")


def new_run_id(name: str = DEFAULT_NAME, *, rng: random.Random | None = None) -> str:
    """A fresh run id.

    Args:
        name: lower-case letters, digits and dashes, beginning with a letter, at most 34.
        rng: source of the suffix; by default the system's.

    Raises:
        ConfigError: ``name`` cannot begin a run id.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be a run's name",
            fix="Use at most 34 lower-case letters, digits and dashes, beginning with a letter.",
        )
    suffix = "".join((rng or random.SystemRandom()).choices(ALPHABET, k=SUFFIX_LENGTH))
    return f"{name.rstrip('-')}-{suffix}"


def provider_name(run_id: str, uri: str, created_at: float) -> str:
    """What a run's replicas are named after where they run: ``<run id>-<5 characters>``.

    An id is taken once per store, and an account may serve many stores; and a provider remembers
    the jobs of a run that was deleted. So the id alone does not say whose a job is.

    Args:
        run_id: of the run.
        uri: of its prefix.
        created_at: seconds since the epoch.
    """
    digest = hashlib.sha256(f"{uri} {created_at}".encode()).digest()
    return f"{run_id}-{base64.b32encode(digest).decode().lower()[:_MARK_LENGTH]}"
