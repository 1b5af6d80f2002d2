"""Codecs by name: those of this package, and those that installed packages declare.

A package adds one by declaring what makes it, and nothing of it is imported until it is chosen::

    [project.entry-points."diloco_cloud.codecs"]
    mine = "my_package.codec:MyCodec"
"""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Final

from diloco_cloud.errors import ConfigError, DilocoError, MissingDependencyError, UsageError

if TYPE_CHECKING:
    from diloco_cloud.exchange.codecs.base import Codec

GROUP: Final = "diloco_cloud.codecs"
_HERE: Final = "diloco_cloud.exchange.codecs"
#: A name is a wire format for good: another format gets another name, and nobody overrides these.
_BUILT_IN: Final = {
    "fp32": f"{_HERE}.plain:Float32",
    "bf16": f"{_HERE}.plain:BFloat16",
    "int8": f"{_HERE}.int8:Int8",
    "e3m0": f"{_HERE}.fourbit:E3M0",
    "e2m1": f"{_HERE}.fourbit:E2M1",
    "sparse": f"{_HERE}.sparse:Sparse",
}


def codec_names() -> list[str]:
    """The codecs that can be asked for: this package's from exact to small, then the others'."""
    return [*_BUILT_IN, *sorted(entry_points(group=GROUP).names - _BUILT_IN.keys())]


def require_codec(name: str) -> None:
    """Raise ``ConfigError`` unless there is a codec of that name; loads nothing."""
    if name not in codec_names():
        raise _unknown(name)


def get_codec(name: str, **options: Any) -> Codec:
    """Load a codec.

    Args:
        name: as in ``codec_names()``.
        **options: of the codec's encoder. Decoding needs none: a name fixes the format.

    Raises:
        ConfigError: no codec of that name, or it does not accept ``options``.
        MissingDependencyError: it needs a package that is not installed.
        UsageError: it is declared twice, or is broken.
    """
    from diloco_cloud.exchange.codecs.base import Codec

    entry = _find(name)
    try:
        codec = entry.load()(**options)
    except DilocoError:
        raise
    except ImportError as error:
        raise MissingDependencyError(
            f"the codec {name!r} ({entry.value}) cannot be imported: {error}",
            fix="Install what it needs, or choose another codec.",
        ) from error
    except Exception as error:  # whatever a plug-in of somebody else's raises
        if options and isinstance(error, TypeError | ValueError):
            raise ConfigError(
                f"the codec {name!r} does not accept {options}: {error}",
                fix="Check the codec's options.",
            ) from error
        raise _broken(entry, f"{type(error).__name__}: {error}") from error
    if not isinstance(codec, Codec):
        raise _broken(entry, "it is not a Codec")
    _check(entry, codec)
    return codec


def _check(entry: EntryPoint, codec: Codec) -> None:
    """Raise ``UsageError`` unless a codec says of itself what rounds rely on."""
    for attribute in ("name", "bits_per_parameter"):
        if not hasattr(codec, attribute):
            raise _broken(entry, f"it has no {attribute}")
    if codec.name != entry.name:
        raise _broken(entry, f"it calls itself {codec.name!r}")
    # Looking for entry points takes milliseconds: only where the name is none of ours.
    if codec.sums not in {"raw", "", *_BUILT_IN} and codec.sums not in codec_names():
        raise _broken(entry, f"its sums are to travel in {codec.sums!r}, which is no codec")


def _find(name: str) -> EntryPoint:
    if name in _BUILT_IN:
        return EntryPoint(name, _BUILT_IN[name], GROUP)
    # A dictionary: one distribution may be found twice, by an editable install for example.
    found = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}
    if not found:
        raise _unknown(name)
    if len(found) > 1:
        raise UsageError(
            f"the codec {name!r} is declared more than once: {', '.join(sorted(found))}",
            fix="Uninstall all but one of these packages.",
        )
    return next(iter(found.values()))


def _unknown(name: str) -> ConfigError:
    names = codec_names()
    close = difflib.get_close_matches(name, names, n=1)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    return ConfigError(f"there is no codec {name!r}", fix=f"{guess}Known: {', '.join(names)}.")


def _broken(entry: EntryPoint, why: str) -> UsageError:
    return UsageError(
        f"the codec {entry.name!r} ({entry.value}) cannot be used: {why}",
        fix="Update or uninstall the package that declares it.",
    )
