"""Keeping credentials out of what is shown."""

from __future__ import annotations

import os
import re
from typing import Final

from diloco_cloud.secrets import masked

_SECRET_NAME: Final = re.compile(r"KEY|SECRET|TOKEN|PASSW|CREDENTIAL|SAS", re.IGNORECASE)
_QUERY: Final = re.compile(r"(https?://[^\s?\"']*)\?[^\s\"')]*")
_USER: Final = re.compile(r"(\w://)[^\s/@]*@")
#: Shorter values are words that a message may contain by chance.
_MIN_SECRET: Final = 8


def redacted(text: str) -> str:
    """``text`` without URL queries, users in URLs, and values of secret environment variables."""
    values = (
        value
        for name, value in os.environ.items()
        if len(value) >= _MIN_SECRET and _SECRET_NAME.search(name)
    )
    return _USER.sub(r"\1***@", _QUERY.sub(r"\1", masked(text, values)))
