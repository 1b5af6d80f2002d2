"""Run ids, unique without coordination: ``<name>-<5 random characters>``."""

from __future__ import annotations

import random
import re

from diloco_cloud.errors import ConfigError

#: No vowels, so no words; no 0, 1, l: ids are read aloud and typed.
ALPHABET = "bcdfghjkmnpqrstvwxz2456789"
SUFFIX_LENGTH = 5
DEFAULT_NAME = "diloco"

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
