"""Secrets on their way to replicas: whoever meets one sees its name, never its value.

A :class:`Secret` is made from the launcher's environment and stays one in every request that an
executor builds, so that a preview, a log or an error can show the request as it is. Only the
function that speaks to the provider calls :meth:`Secret.reveal`. What a provider answers is put
through :func:`redacted`: many a server quotes what it does not like.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import re
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NoReturn, final
from urllib.parse import quote, quote_plus

from diloco_cloud.errors import ConfigError

_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_HOW: Final = "Write NAME, or NAME=SOURCE where SOURCE is the variable's name here: never a value."
#: What stands for a value where it was taken out.
MASK: Final = "***"
#: Values of fewer characters are masked as whole words only.
_SHORT: Final = 4


@final
class Secret:
    """A value that only :meth:`reveal` tells, and the name of the variable it is for.

    It cannot be pickled, rather than arrive without its value: a replica that starts with nothing
    where its token should be fails late and far away. A copy is the secret itself, so that
    containers of secrets can be copied.

    Args:
        name: of the replica's variable.
        value: what nobody is to see.

    Raises:
        TypeError: one of them is no text.
    """

    __slots__ = ("_name", "_reveal")

    def __init__(self, name: str, value: str) -> None:
        if not all(isinstance(text, str) for text in (name, value)):
            kinds = f"{type(name).__name__} and {type(value).__name__}"
            raise TypeError(f"a secret is a name and a value, both texts, not {kinds}")
        self._name = name
        # In a closure: what walks an object's attributes to show or to store them finds none.
        self._reveal: Callable[[], str] = lambda: value

    @property
    def name(self) -> str:
        """Of the replica's variable."""
        return self._name

    def reveal(self) -> str:
        """The value. For the provider's secret channel, and nothing else."""
        return self._reveal()

    def __repr__(self) -> str:
        return f"<Secret {self._name}>"

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def __eq__(self, other: object) -> bool:
        """In a time that tells nothing of the values but their lengths."""
        if not isinstance(other, Secret):
            return NotImplemented
        values = (one.reveal().encode(errors="surrogatepass") for one in (self, other))
        return hmac.compare_digest(*values) and self._name == other._name

    def __hash__(self) -> int:
        return hash((Secret, self._name))

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __getstate__(self) -> NoReturn:
        raise TypeError(f"the secret {self._name} stays in its process: it cannot be pickled")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.__getstate__()


def parse_secret(entry: str) -> tuple[str, str]:
    """The variable of the replica, and the variable here that it takes its value from.

    Args:
        entry: "NAME", or "NAME=SOURCE".

    Raises:
        ConfigError: it is neither. It is not repeated: it may be a value, given by mistake.
    """
    name, given, source = entry.partition("=")
    if _VARIABLE.fullmatch(name) is None:
        raise ConfigError("a secret's name is no name of a variable", fix=_HOW)
    if given and _VARIABLE.fullmatch(source) is None:
        raise ConfigError(f"what follows {name}= is no name of a variable", fix=_HOW)
    return name, source or name


def read_secrets(entries: Sequence[str], environ: Mapping[str, str]) -> dict[str, Secret]:
    """Secrets by the replica's variable.

    Args:
        entries: see :func:`parse_secret`.
        environ: where the values are.

    Raises:
        ConfigError: an entry that is no name, one that is missing or no text, or a name twice.
    """
    secrets: dict[str, Secret] = {}
    for entry in entries:
        name, source = parse_secret(entry)
        if source not in environ:
            raise _missing(name, source)
        # Left by bytes that are not UTF-8. No provider takes them, and the error of whoever tried
        # to encode them would hold the value.
        if any("\ud800" <= char <= "\udfff" for char in environ[source]):
            raise ConfigError(f"the secret {source} is not UTF-8 text", fix="Encode it: in base64.")
        secret = Secret(name, environ[source])
        if secrets.setdefault(name, secret) != secret:
            raise ConfigError(
                f"the secret {name} is given twice, with two values", fix="Leave one of them out."
            )
    return secrets


def _missing(name: str, source: str) -> ConfigError:
    if source == name:
        return ConfigError(
            f"the secret {name} is not set in this environment",
            fix=f"Export {name} before launching.",
        )
    # Not repeated: it may be `--secret TOKEN=the-token-itself`, as other tools have it.
    return ConfigError(
        f"the variable given after {name}= is not set in this environment",
        fix=f"Export it before launching. {_HOW}",
    )


def revealed(secrets: Mapping[str, Secret]) -> dict[str, str]:
    """The values, as a provider's SDK takes them: to be called where they are handed over."""
    return {name: secret.reveal() for name, secret in secrets.items()}


def redacted(text: str, secrets: Iterable[Secret]) -> str:
    """``text`` with :data:`MASK` for the values, plain or as requests and errors quote them.

    A value of less than four characters is taken out where it is a word of its own: within others
    it would be found everywhere, which tells more of it than it hides.
    """
    return masked(text, (secret.reveal() for secret in secrets))


def masked(text: str, values: Iterable[str]) -> str:
    """The same for values that are not secrets of a run. Empty ones are passed over."""
    forms: dict[str, str] = {}
    for value in values:
        for form in filter(None, _forms(value)):
            whole = re.escape(form)
            forms[form] = whole if len(value) >= _SHORT else rf"(?<!\w){whole}(?!\w)"
    if not forms:
        return text
    longest_first = sorted(forms, key=len, reverse=True)  # none leaves the rest of a longer one
    return re.sub("|".join(forms[form] for form in longest_first), MASK, text)


def _forms(value: str) -> Iterator[str]:
    """A value as it is, in JSON, in JSON within JSON, in Python, in a URL and in a shell."""
    yield value
    for ascii_only in (True, False):
        inner = json.dumps(value, ensure_ascii=ascii_only)[1:-1]
        yield from (inner, json.dumps(inner, ensure_ascii=ascii_only)[1:-1])
    yield repr(value)[1:-1]
    yield repr(value.encode(errors="surrogatepass"))[2:-1]
    yield shlex.quote(value).removeprefix("'").removesuffix("'")
    for write in (quote, quote_plus):
        yield write(value, safe="", errors="surrogatepass")


_quieting = threading.Lock()


@contextlib.contextmanager
def unlogged(*names: str) -> Iterator[None]:
    """Keep loggers, and those below them, from writing at level DEBUG, as SDKs do whole requests.

    They are not told apart by thread: what others write at that level meanwhile is lost, too.

    Args:
        names: of loggers.
    """
    with _quieting:  # else the first of two to end would let the other one be heard
        loggers = [logging.getLogger(name) for name in names]
        loggers += [
            logger
            for name, logger in list(logging.root.manager.loggerDict.items())
            if isinstance(logger, logging.Logger) and name.startswith(tuple(f"{n}." for n in names))
        ]
        levels = [(logger, logger.level) for logger in loggers]
        try:
            for logger in loggers:
                logger.setLevel(max(logging.INFO, logger.getEffectiveLevel()))
            yield
        finally:
            for logger, level in levels:
                logger.setLevel(level)
