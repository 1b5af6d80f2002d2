"""Which faults, and how often; as a dataclass and as the query of a URI."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl, urlencode

from diloco_cloud.errors import ConfigError

#: Spans of time, each (start, end) in seconds since the store was opened.
Windows: TypeAlias = tuple[tuple[float, float], ...]

_PROBABILITIES: Final = (
    "throttled",
    "timeout",
    "lost_reply",
    "duplicate",
    "torn",
    "expired",
    "stale_list",
)
_AMOUNTS: Final = ("latency", "stale_s", "stale_n", "clock_skew_s")


@dataclass(frozen=True)
class Faults:
    """What goes wrong. Probabilities are per request, and independent of one another.

    Attributes:
        seed: of everything that is drawn.
        latency: mean of the exponential delay of every request, in seconds.
        throttled: "slow down" (``ThrottledError``); nothing was done.
        timeout: no answer (``UnreachableError``); nothing was done.
        lost_reply: no answer to a write or a delete; it was done, or refused, all the same.
        duplicate: a write reaches the store twice, as when a client or a proxy sends it again:
            half of the copies at once, half just before the store's next request (by then others
            may have deleted the object, and a late ``create`` brings it back). The copy of a
            ``create`` is refused where the object exists.
        torn: an upload is cut off in the middle (``UnreachableError``). Nothing becomes visible.
        torn_visible: a torn upload leaves its first part under the key, as stores do that
            promise no whole objects.
        expired: the store refuses the credentials as expired; nothing was done.
        expiries: when it refuses them every time.
        stale_list: a listing misses what was written lately, ...
        stale_s: ... in so many seconds before it, ...
        stale_n: ... or as the last so many objects.
        clock_skew_s: times of objects are off by a constant of each process, at most this many
            seconds to either side.
        partitions: when nothing can be reached (``UnreachableError``).
        partition_file: nothing can be reached while this file exists. ``{rank}`` in it stands for
            the replica's rank, and for "launcher" in a process that has none.
    """

    seed: int = 0
    latency: float = 0.0
    throttled: float = 0.0
    timeout: float = 0.0
    lost_reply: float = 0.0
    duplicate: float = 0.0
    torn: float = 0.0
    torn_visible: bool = False
    expired: float = 0.0
    expiries: Windows = ()
    stale_list: float = 0.0
    stale_s: float = 0.0
    stale_n: int = 0
    clock_skew_s: float = 0.0
    partitions: Windows = ()
    partition_file: str = ""

    def __post_init__(self) -> None:
        for name in _PROBABILITIES:
            if not 0 <= getattr(self, name) <= 1:
                raise _refused(name, getattr(self, name), "a probability from 0 to 1")
        for name in _AMOUNTS:
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise _refused(name, getattr(self, name), "a number from 0 up")
        for name in ("expiries", "partitions"):
            for start, end in getattr(self, name):
                if not 0 <= start < end:
                    raise _refused(name, f"{start}:{end}", "START:END, in seconds")
        if self.stale_list and not (self.stale_s or self.stale_n):
            raise ConfigError(
                "stale_list says how often a listing is stale, and nothing says how stale",
                fix="Set stale_s (seconds) or stale_n (objects) too.",
            )

    @classmethod
    def parse(cls, query: str) -> Faults:
        """The faults that the query of a URI asks for; "" asks for none.

        Args:
            query: without its "?"; names and values as :meth:`query` writes them.

        Raises:
            ConfigError: an unknown or repeated name, or a value that is none of its kind.
        """
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
        except ValueError:
            raise ConfigError(
                "the query of the faults+ URI is malformed", fix="Write ?NAME=VALUE&NAME=VALUE."
            ) from None
        kinds = {field.name: str(field.type) for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, text in pairs:
            if name not in kinds:
                raise _unknown(name, kinds)
            if name in values:
                raise ConfigError(f"{name} is given twice in the faults+ URI")
            parse, expected = _KINDS[kinds[name]]
            try:
                values[name] = parse(text)
            except ValueError:
                raise _refused(name, text, expected) from None
        return cls(**values)

    def query(self) -> str:
        """What :meth:`parse` makes these faults of; only what is not at its default."""
        changed = [
            (field.name, _text(getattr(self, field.name)))
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return urlencode(changed, safe=":,{}")


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _windows(text: str) -> Windows:
    spans = (span.partition(":") for span in text.split(","))
    return tuple((float(start), float(end)) for start, _, end in spans)


#: By the annotation of an attribute: how its text is read, and what it is called.
_KINDS: Final[Mapping[str, tuple[Callable[[str], Any], str]]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (_flag, "0 or 1"),
    "str": (str, "a path"),
    "Windows": (_windows, "START:END, in seconds, with commas between several"),
}


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{_text(start)}:{_text(end)}" for start, end in value)
    if isinstance(value, bool):
        return str(int(value))
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _refused(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{name}={value} in the faults is not {expected}")


def _unknown(name: str, known: Mapping[str, str]) -> ConfigError:
    near = difflib.get_close_matches(name, known, n=1)
    fix = f"Did you mean {near[0]}?" if near else f"There are {', '.join(known)}."
    return ConfigError(f"no fault is called {name!r}", fix=fix)
