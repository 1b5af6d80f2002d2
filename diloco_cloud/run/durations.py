"""Lengths of time as people write them: 90, 30s, 10m, 2h, 1d."""

from __future__ import annotations

import re

from diloco_cloud.errors import ConfigError

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")


def parse_duration(value: str | int | float) -> float:
    """Seconds meant by ``value``: a number of seconds, or a number with s, m, h or d.

    Raises:
        ConfigError: neither.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(
            f"{value!r} is not a length of time", fix='Write "90", "30s", "10m", "2h" or "1d".'
        )
    return float(match[1]) * _UNITS[match[2]]


def format_duration(seconds: float) -> str:
    """``seconds`` in its largest one or two units: "42s", "3m 20s", "2h 5m", "1d 4h"."""
    whole = max(0, int(seconds))
    for unit, size, smaller, small in (("d", 86_400, "h", 3600), ("h", 3600, "m", 60)):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size}{unit}" + (f" {rest}{smaller}" if rest else "")
    if whole >= 60:
        return f"{whole // 60}m" + (f" {whole % 60}s" if whole % 60 else "")
    return f"{whole}s"
